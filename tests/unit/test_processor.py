"""The processor's level: what it is read from, how it is limited, and who is told."""

import json
import os
import subprocess
import sys

import pytest

from paceline import processor
from paceline.errors import UsageError

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


def test_a_level_that_there_is_not_is_refused_with_the_levels_that_there_are(pretend):
    pretend(BF16, limit="sse2")
    with pytest.raises(UsageError, match="'sse2', wanted one of avx2, avx512, avx512_bf16, amx"):
        processor.level()


def test_other_libraries_are_limited_alike(pretend, monkeypatch: pytest.MonkeyPatch):
    variables = processor._LEVELS["avx512_bf16"].limits
    for variable in variables:
        monkeypatch.setenv(variable, "")
    pretend(AMX, limit="avx512_bf16")
    processor.limit_libraries()
    assert {variable: os.environ[variable] for variable in variables} == variables


def test_without_a_limit_nothing_is_set(pretend, monkeypatch: pytest.MonkeyPatch):
    variables = processor._LEVELS["avx2"].limits
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
