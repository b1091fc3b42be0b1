"""Settings of all tests: no network, one thread, float32. Loads tests/support/fixtures.py."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# as the command line sets them
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
# tiny models gain nothing from threads, and threads that wait for each other cost minutes
os.environ.setdefault("OMP_NUM_THREADS", "1")

# on a busy machine another precision may be the faster one, and a test compares runs
os.environ.setdefault("PACELINE_PRECISION", "float32")

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that need none, whose models and tokens are on the CPU.

    Load the fixtures, except in xdist's controller: it runs no test, and they import models.
    """
    if config.getoption("markexpr") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not is_controller:
        gc.disable()  # until the tests are collected: what imports make stays
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are."""
    import torch

    for item in items:
        for marker in item.iter_markers("cuda"):
            wanted = marker.kwargs.get("cards", 1)
            if torch.cuda.device_count() < wanted:
                needs = "a GPU" if wanted == 1 else f"{wanted} GPUs"
                item.add_marker(pytest.mark.skip(reason=f"needs {needs}, and make gpu-test"))
