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


_LEFT = textwrap.dedent("""
    import time
    from pathlib import Path
    from paceline.errors import GenerationError
    from paceline.processes import in_processes

    def train(path):
        from paceline.train.loop import StopRequest  # not in the main process

        with StopRequest() as request:
            Path(path).write_text("begun")
            while not request.asked:
                time.sleep(0.02)
            Path(path).write_text("saved")

    def main(items):
        list(in_processes(train, items, workers=2, name=str, failure=GenerationError))
""")


@pytest.mark.slow
def test_a_worker_whose_main_process_is_killed_saves_its_work_and_ends(tmp_path: Path):
    """Else a killed command would go on writing, in directories that the next one needs."""
    (tmp_path / "left.py").write_text(_LEFT)
    files = [tmp_path / "one", tmp_path / "two"]
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    main = start(begin + "import left; left.main(sys.argv[1:])", *files)
    while not all(file.exists() and file.read_text() == "begun" for file in files):
        assert main.poll() is None, finish(main).stderr
        time.sleep(0.02)
    main.send_signal(signal.SIGKILL)
    assert finish(main).returncode == -signal.SIGKILL
    while any(file.read_text() != "saved" for file in files):
        time.sleep(0.02)  # a timeout of pytest ends this if a worker goes on
