"""Work dealt out to processes: what is wrong, and what Ctrl-C does."""

import os
import signal

import pytest

from paceline.errors import GenerationError
from paceline.processes import in_processes
from paceline.train.guard import StopRequest


def _interrupted(item: int) -> bool:
    """Ctrl-C, sent by a terminal to all processes, while this one trains: is it asked to stop?"""
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        return request.asked


def _fails(item: int) -> int:
    raise ZeroDivisionError(f"of {item}")


@pytest.mark.slow
def test_a_worker_leaves_ctrl_c_to_its_parent():
    done = in_processes(_interrupted, [1, 2], workers=2, name=str, failure=GenerationError)
    assert sorted(done) == [(1, False), (2, False)]


@pytest.mark.slow
def test_a_failure_names_what_it_was_over_in_one_line():
    done = in_processes(_fails, [7], workers=2, name=str, failure=GenerationError)
    with pytest.raises(GenerationError, match=r"^ZeroDivisionError: of 7 \(7\)$"):
        list(done)


def _variable(name: str) -> str | None:
    return os.environ.get(name)


def test_a_worker_has_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch):
    """Also if the process that workers are copied from has started before."""
    for value in ("first", "second"):
        monkeypatch.setenv("PACELINE_TEST_VALUE", value)
        names = ["PACELINE_TEST_VALUE", "PACELINE_TEST_NOTHING"]
        done = in_processes(_variable, names, workers=1, name=str, failure=GenerationError)
        assert dict(done) == dict(zip(names, (value, None), strict=True))
