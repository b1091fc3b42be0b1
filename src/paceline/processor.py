"""What the CPU can do, decided in one place, and a limit on it.

`PACELINE_CPU` limits Paceline, torch and the libraries below torch to an older level of
instructions, so that tests and timings on one machine hold for another. It never raises the level.
This module does not import torch: the libraries read their limits when they are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError

VARIABLE = "PACELINE_CPU"
GENERIC = "generic"
"""Any processor without AVX2."""

_ARCH_REQ_XCOMP_PERM, _XTILEDATA = 0x1023, 18  # Linux grants tile registers on request
_SYS_ARCH_PRCTL = 158


class _Level(NamedTuple):
    """A level of instructions.

    Attributes:
        flags: The names in /proc/cpuinfo that it adds to the level below.
        march: The compiler's options for it.
        limits: The environment variables that hold other libraries at it; empty where they need none.
    """

    flags: tuple[str, ...]
    march: tuple[str, ...]
    limits: dict[str, str]


_LEVELS = {
    "avx2": _Level(
        ("avx2", "fma", "f16c"),
        ("-march=x86-64-v3",),
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "avx512": _Level(
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ("-march=x86-64-v4",),
        {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_E1",
        },
    ),
    "avx512_bf16": _Level(
        ("avx512_bf16",),
        ("-march=x86-64-v4", "-mavx512bf16"),
        {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_E1",
        },
    ),
    "amx": _Level(("amx_tile", "amx_bf16", "amx_int8"), (), {}),
}
LEVELS = tuple(_LEVELS)
"""What `PACELINE_CPU` accepts, each level including those before it."""


def level() -> str:
    """The level that Paceline uses: the machine's, or a lower one that `PACELINE_CPU` names.

    Raises:
        UsageError: `PACELINE_CPU` names no level.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return machine_level()
    if wanted not in LEVELS:
        raise UsageError(
            f"{VARIABLE} is {wanted!r}, wanted one of {', '.join(LEVELS)}; unset it to use all that "
            "the processor has"
        )
    available = usable_levels()
    return wanted if wanted in available else machine_level()


@functools.cache
def machine_level() -> str:
    """The highest level of this machine: of its processor, and of what its kernel permits."""
    available = usable_levels()
    return available[-1] if available else GENERIC


@functools.cache
def usable_levels() -> tuple[str, ...]:
    """All levels that this machine can run, lowest first."""
    levels = _levels_of(processor_flags())
    if "amx" in levels and not _may_use_tiles():
        levels = levels[: levels.index("amx")]
    return levels


def compile_flags(wanted: str) -> tuple[str, ...]:
    """Compiler options behind `-march=native` that limit the instructions to this level."""
    native = _levels_of(processor_flags())
    if wanted == GENERIC or (native and wanted == native[-1]):
        return ()
    # Integer dot products are no level of their own: some AVX-512 processors have them.
    has_dots = wanted.startswith("avx512") and "avx512_vnni" in processor_flags()
    return (*_LEVELS[wanted].march, "-mtune=native", *(["-mavx512vnni"] if has_dots else []))


def limit_libraries() -> None:
    """Pass a valid `PACELINE_CPU` on to oneDNN, ATen, MKL and FBGEMM; call before torch computes.

    A name that is no level changes nothing: `level` refuses it.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted or wanted not in usable_levels()[:-1]:
        return
    limits = limits_of(wanted)
    changed = {name: value for name, value in limits.items() if os.environ.get(name) != value}
    if changed and "torch" in sys.modules:
        warnings.warn(
            f"{VARIABLE} is {wanted}, but torch was imported before paceline and may have read its "
            "own limits already; import paceline first",
            stacklevel=2,
        )
    os.environ.update(changed)


def limits_of(wanted: str) -> dict[str, str]:
    """The variables that hold other libraries at a level; a lower limit that is already set stays."""
    lower = [_LEVELS[name].limits for name in LEVELS[: LEVELS.index(wanted)]]
    kept = {
        name: os.environ[name]
        for name in _LEVELS[wanted].limits
        if os.environ.get(name) in {limits[name] for limits in lower}
    }
    return _LEVELS[wanted].limits | kept


@functools.cache
def processor_flags() -> frozenset[str]:
    """The instructions that /proc/cpuinfo lists; empty on other systems than Linux."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


@functools.cache
def processor_name() -> str:
    """The processor's name, as the system gives it."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _levels_of(flags: frozenset[str]) -> tuple[str, ...]:
    levels: list[str] = []
    for name, level_ in _LEVELS.items():
        if not flags.issuperset(level_.flags):
            break
        levels.append(name)
    return tuple(levels)


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _may_use_tiles() -> bool:
    """Ask the kernel for the tile registers; a container or an old kernel may refuse them."""
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0
