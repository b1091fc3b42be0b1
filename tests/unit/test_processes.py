"""Work dealt out to processes: what is wrong, and what Ctrl-C does."""

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from paceline.errors import GenerationError
from paceline.processes import in_processes
from paceline.train.loop import StopRequest
from support.processes import finish, start


def _interrupted(item: int) -> None:
    """Ctrl-C, sent by a terminal to all processes: is this one asked to stop?"""
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert not request.asked


def _fails(item: int) -> None:
    raise ZeroDivisionError(f"of {item}")


@pytest.mark.slow
def test_a_worker_leaves_ctrl_c_to_its_parent():
    assert sorted(in_processes(_interrupted, [1, 2], 2)) == [1, 2]


@pytest.mark.slow
def test_a_failure_is_one_line():
    with pytest.raises(GenerationError, match=r"^ZeroDivisionError: of 7$"):
        list(in_processes(_fails, [7], 2))


_LEFT = textwrap.dedent("""
    import time
    from pathlib import Path
    from paceline.processes import in_processes

    def work(path):
        Path(path).write_text("begun")
        time.sleep(300)

    def main(items):
        list(in_processes(work, items, 2))
""")


@pytest.mark.slow
def test_a_worker_whose_main_process_is_killed_ends(tmp_path: Path):
    """Else a killed command would go on writing, in directories that the next one needs."""
    (tmp_path / "left.py").write_text(_LEFT)
    files = [tmp_path / "one", tmp_path / "two"]
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    main = start(begin + "import left; left.main(sys.argv[1:])", *files)
    while not all(file.exists() for file in files):
        assert main.poll() is None, finish(main).stderr
        time.sleep(0.02)
    main.send_signal(signal.SIGKILL)
    assert finish(main).returncode == -signal.SIGKILL  # its stderr, which workers share, is closed


def _check_variable(value: str) -> None:
    assert os.environ["PACELINE_TEST_VALUE"] == value


def test_a_worker_has_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch):
    """Also if the process that workers are copied from has started before."""
    for value in ("first", "second"):
        monkeypatch.setenv("PACELINE_TEST_VALUE", value)
        assert list(in_processes(_check_variable, [value], 1)) == [value]
