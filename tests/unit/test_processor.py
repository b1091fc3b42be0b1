"""The processor's level: its source, limit and reports; work dealt out to processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline import processor
from paceline.errors import GenerationError, UsageError
from paceline.processes import in_processes
from paceline.train.loop import StopRequest
from support.processes import finish, start

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """A function that gives this machine other instructions, and its kernel's word on tiles."""

    def pretend(flags: set[str], *, tiles: bool = True, limit: str | None = None) -> None:
        monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(flags))
        monkeypatch.setattr(processor, "_may_use_tiles", lambda: tiles)
        monkeypatch.delenv(processor.VARIABLE, raising=False)
        if limit is not None:
            monkeypatch.setenv(processor.VARIABLE, limit)
        processor.usable_levels.cache_clear()
        processor.machine_level.cache_clear()

    yield pretend
    monkeypatch.undo()
    processor.usable_levels.cache_clear()
    processor.machine_level.cache_clear()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (set(), "generic"),
        ({"sse4_2", "avx2"}, "generic"),  # without fused multiply-add there is no such level
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),  # the first AVX-512 processors lack half of it
        (AVX512, "avx512"),
        (BF16, "avx512_bf16"),
        (AMX, "amx"),
        (AMX - {"avx512_bf16"}, "avx512"),  # a level includes those before it
    ],
)
def test_the_level_is_the_highest_that_the_processor_lists(pretend, flags, expected):
    pretend(flags)
    assert processor.level() == expected


def test_tiles_that_the_kernel_refuses_are_no_level(pretend):
    pretend(AMX, tiles=False)
    assert processor.level() == "avx512_bf16"
    assert "-mamx-tile" in processor.compile_flags("amx")
    assert "-mamx-tile" not in processor.compile_flags("avx512_bf16")


def test_the_variable_narrows_and_never_widens(pretend):
    pretend(BF16, limit="avx2")
    assert (processor.level(), processor.machine_level()) == ("avx2", "avx512_bf16")
    pretend(BF16, limit="amx")
    assert processor.level() == "avx512_bf16"
    pretend(BF16, limit="")
    assert processor.level() == "avx512_bf16"
    pretend(BF16, limit="sse2")
    with pytest.raises(UsageError, match="'sse2', wanted one of avx2, avx512, avx512_bf16, amx"):
        processor.level()


def test_other_libraries_are_limited_alike(pretend, monkeypatch: pytest.MonkeyPatch):
    level = processor._LEVELS["avx512_bf16"]
    variables = dict(zip(processor._LIMITED, level.limits, strict=True))
    for variable in variables:
        monkeypatch.setenv(variable, "")
    pretend(AMX, limit="avx512_bf16")
    processor.limit_libraries()
    assert {variable: os.environ[variable] for variable in variables} == variables


def test_without_a_limit_nothing_is_set(pretend, monkeypatch: pytest.MonkeyPatch):
    variables = processor._LIMITED
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    for limit in (None, "amx", "nonsense"):
        pretend(AMX, limit=limit)
        processor.limit_libraries()
        assert not any(variable in os.environ for variable in variables)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in processor.usable_levels(), reason="a processor without AVX2")
def test_torch_keeps_the_limit_and_the_environment_reports_it():
    script = (
        "import json, paceline, torch; from paceline.environment import environment; "
        "print(json.dumps([torch.backends.cpu.get_cpu_capability(), environment()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, processor.VARIABLE: "avx2"},
        capture_output=True,
        text=True,
        check=True,
    )
    capability, environment = json.loads(done.stdout)
    assert capability == "AVX2"
    assert environment["processor_level"] == "avx2"
    assert environment["machine_level"] == processor.machine_level()


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


# without torch and transformers, whose imports take seconds
_LEFT = textwrap.dedent("""
    import sys, time
    from multiprocessing.context import BaseContext
    from pathlib import Path
    from unittest.mock import MagicMock
    from paceline.processes import in_processes

    sys.modules["torch"] = MagicMock(**{"get_num_threads.return_value": 2})
    sys.modules["torch"].cuda.is_available.return_value = False
    BaseContext.set_forkserver_preload = lambda *_: None

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
