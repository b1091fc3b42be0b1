"""Record versions, hardware and the git commit for manifests and reports."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.processor import level, machine_level, processor_name
from paceline.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

began: ContextVar[datetime | None] = ContextVar("began", default=None)
"""Local time at which the run around a call began, the clock of its chat templates."""


@contextlib.contextmanager
def begin(manifest: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Begin a run, or resume that of a manifest; a run inside another began with it."""
    recorded = (manifest or {}).get("environment", {}).get("began")
    now = datetime.fromisoformat(recorded) if recorded else began.get()
    token = began.set(now or datetime.now().replace(microsecond=0))
    try:
        yield
    finally:
        began.reset(token)


def busy_processors() -> int:
    """Processors that other programs use: the median of five looks; 0 where Linux has no answer."""
    looks: list[int] = []
    with contextlib.suppress(OSError):
        for _ in range(5):
            running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
            looks.append(int(running) - 1)  # less this thread
            time.sleep(0.02)
    return max(0, statistics.median_low(looks or [0]))


def how_to_install(extra: str) -> str:
    """The command that installs the libraries of an extra, in a clone and beside a wheel."""
    wanted = importlib.metadata.requires("paceline") or []
    names = [one.split(";")[0].strip() for one in wanted if one.endswith(f'extra == "{extra}"')]
    return f"pip install {' '.join(map(repr, names))}"


def environment() -> dict[str, Any]:
    """Versions, hardware, git state, and of a run `began`; `gpu` if this process has used one."""
    packages = ("torch", "transformers", "accelerate", "datasets", "safetensors")
    versions = {"paceline": __version__}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = package_version(package)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "processor_level": level(),
        "machine_level": machine_level(),
        "cpu_count": os.cpu_count(),
        "git": _git_state(),
        **({"began": str(now)} if (now := began.get()) else {}),
    } | _gpu()


@functools.cache
def package_version(name: str) -> str:
    """Version of an installed package; to read one takes milliseconds.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(name)


def _gpu() -> dict[str, str]:
    """Names of the GPUs if this process has used one; does not import torch or start CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    return {"gpu": ", ".join(dict.fromkeys(names))}


@functools.cache
def _git_state() -> dict[str, Any] | None:
    """Commit of the source tree; None if Paceline does not run from a checkout of its own.

    Asked once: a process runs the code that it has loaded, and a bench records it in each row. A
    repository around an installed package is not asked: its settings can name programs.
    """
    source = Path(__file__).resolve().parents[1]
    if source.name != "src" or not (source.parent / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), "--git-dir=.git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src/paceline")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware() -> dict[str, Any]:
    """Memory (bytes, capped by the control group), usable CPUs and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return {
        "memory_bytes": _memory_bytes(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in gpus
        ],
        "cuda": torch.version.cuda,
    }


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total
