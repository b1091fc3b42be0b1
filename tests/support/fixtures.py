"""Fixtures and hooks of all tests: no cache outside the test, tiny models."""

import os

import paceline  # noqa: F401 - before torch, whose libraries PACELINE_CPU limits

# isort: split
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from paceline.data import input_checks
from paceline.errors import PacelineError
from paceline.models import CausalModel
from paceline.processes import keep_freed_memory
from support.models import save_tiny, tiny_pair, tiny_tokenizer

input_checks.busy_processors = lambda: 0  # other tests compute beside each


def pytest_sessionstart(session: pytest.Session) -> None:
    """A cache outside of the user's, before test modules are imported: some compile.

    One for all processes of a test run, as compiling takes seconds.
    """
    base: Path = session.config._tmp_path_factory.getbasetemp()  # pyright: ignore
    whole_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = os.environ.get("PACELINE_TEST_CACHE") or str(whole_run / "paceline-cache")
    os.environ["PACELINE_CACHE"] = cache


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: a worker takes over the last tests of another, which should be short."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    if transformers.__version__.startswith(("5.16.", "5.17.")):
        reason = f"the decoder of UMT5 is not causal in transformers {transformers.__version__}"
        for item in items:
            if "umt5" in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Let the collector of garbage look at what tests make alone.

    It spent a third of the time of many tests, most of it on what imports have left, which stays.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    keep_freed_memory()  # as the program does: page faults took as long as many computations


@pytest.fixture(autouse=True)
def no_permissions_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PACELINE_IMPORTS", "PACELINE_PROGRAMS"):
        monkeypatch.setenv(variable, "")


@pytest.fixture(autouse=True)
def errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of every error that a test makes in this process, caught or not."""
    broken: list[PacelineError] = []

    def start(self: PacelineError, *given: object) -> None:
        super(PacelineError, self).__init__(*given)
        if "\n" in str(self):
            broken.append(self)

    monkeypatch.setattr(PacelineError, "__init__", start)
    yield
    assert not broken, broken


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def pair() -> tuple[CausalModel, CausalModel]:
    """A random target of four layers and a random draft of two, with one tokenizer."""
    return tiny_pair()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a tiny draft and a corpus; see `write_pair`."""
    from support.runs import write_pair  # its imports take a second

    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def _saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_tiny(path)
    return path


@pytest.fixture
def model_directory(tmp_path: Path, _saved_model: Path) -> Path:
    """A tiny llama saved as an ordinary model directory with its tokenizer."""
    return shutil.copytree(_saved_model, tmp_path / "tiny-llama")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weights of any model is a fault of the test."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(
        "paceline.models.checkpoint_files.AutoModelForCausalLM.from_pretrained", refuse
    )
