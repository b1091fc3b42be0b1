"""Shared by all tests: no network, no cache outside the test, tiny models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tiny models gain nothing from threads, and threads that wait for each other cost minutes
os.environ.setdefault("OMP_NUM_THREADS", "1")

# on a busy machine another precision may be the faster one, and a test compares runs
os.environ.setdefault("PACELINE_PRECISION", "float32")

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Fixtures where tests run; what hands them out to processes is spared seconds of imports."""
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("shared_fixtures")
