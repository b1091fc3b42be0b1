"""Instruction-set levels of the CPU, and the environment variable that lowers the level in use.

`PACELINE_CPU` limits Paceline, torch and torch's libraries to an older instruction set, so that one
machine can test and time others. It never raises the level. This module does not import torch,
because the libraries read their limits when they are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError

VARIABLE = "PACELINE_CPU"
GENERIC = "generic"
"""The level of a processor without AVX2."""

_ARCH_REQ_XCOMP_PERM, _XTILEDATA = 0x1023, 18  # Linux permits AMX tile registers on request
_SYS_ARCH_PRCTL = 158


_LIMITED = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"


class _Level(NamedTuple):
    """An instruction-set level.

    Attributes:
        flags: Flags in /proc/cpuinfo that the level adds to the one below.
        march: Compiler options, the same on every processor, so that its results are, too.
        limits: Values of `_LIMITED`, variables that limit other libraries to the level.
    """

    flags: tuple[str, ...]
    march: tuple[str, ...]
    limits: tuple[str, ...]


_LEVELS = {
    "avx2": _Level(("avx2", "fma", "f16c"), ("-march=x86-64-v3",), ("AVX2", "avx2", "AVX2")),
    "avx512": _Level(
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ("-march=x86-64-v4",),
        ("AVX512_CORE_VNNI", "avx512", "AVX512_E1"),
    ),
    "avx512_bf16": _Level(
        ("avx512_bf16",),
        ("-march=x86-64-v4", "-mavx512bf16"),
        ("AVX512_CORE_BF16", "avx512", "AVX512_E3"),
    ),
    "amx": _Level(
        ("amx_tile", "amx_bf16", "amx_int8"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (),
    ),
}
LEVELS = tuple(_LEVELS)
"""Values of `PACELINE_CPU`; each level includes the ones before it."""


def level() -> str:
    """The level in use: the machine's, or a lower one set in `PACELINE_CPU`.

    Raises:
        UsageError: `PACELINE_CPU` is not a level.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return machine_level()
    if wanted not in LEVELS:
        raise UsageError(
            f"{VARIABLE} is {wanted!r}, wanted one of {', '.join(LEVELS)}; unset it to use all "
            "instructions of the processor"
        )
    return wanted if wanted in usable_levels() else machine_level()


@functools.cache
def machine_level() -> str:
    """The highest level that the processor and the kernel support."""
    available = usable_levels()
    return available[-1] if available else GENERIC


@functools.cache
def usable_levels() -> tuple[str, ...]:
    """All levels that this machine supports, lowest first."""
    levels = _levels_of(processor_flags())
    if "amx" in levels and not _may_use_tiles():
        levels = levels[: levels.index("amx")]
    return levels


def compile_flags(wanted: str) -> tuple[str, ...]:
    """Compiler options for a level; on processors other than x86-64, for this processor."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-march=native",)
    return ("-march=x86-64", "-Wno-psabi") if wanted == GENERIC else _LEVELS[wanted].march


def limit_libraries() -> None:
    """Pass `PACELINE_CPU` on to oneDNN, ATen and MKL; call before torch is imported.

    Ignores invalid values, which `level` reports.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted or wanted not in usable_levels()[:-1]:
        return
    os.environ.update(zip(_LIMITED, _LEVELS[wanted].limits, strict=True))


@functools.cache
def processor_flags() -> frozenset[str]:
    """The instruction-set flags in /proc/cpuinfo; empty on systems other than Linux."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


@functools.cache
def processor_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _levels_of(flags: frozenset[str]) -> tuple[str, ...]:
    return tuple(itertools.takewhile(lambda name: flags.issuperset(_LEVELS[name].flags), LEVELS))


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _may_use_tiles() -> bool:
    """Request permission for AMX tiles, which containers and old kernels may refuse."""
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0
