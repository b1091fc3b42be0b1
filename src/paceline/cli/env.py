"""`paceline env`: versions and hardware, for bug reports and benchmark results."""

import os
from pathlib import Path
from typing import Any

from paceline.cli import options
from paceline.cli.console import echo, stdout


def env(json: options.Json = False) -> None:
    """Show versions, processor, memory and GPUs."""
    from json import dumps

    from paceline.environment import environment
    from paceline.models.precision import measured_precisions
    from paceline.native import compiled

    found = {**environment(), "compiled": compiled() is not None, **hardware()}
    found["measured_precision"] = measured_precisions()
    if json or not stdout.is_terminal:
        echo(dumps(found, indent=2))
    else:
        for name, value in _rows("", found):
            stdout.print(f"{name:<24} {value}")


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


def _rows(prefix: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name.removesuffix('_bytes')}".replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(f"{label} ", value)
        elif isinstance(value, list):
            for number, part in enumerate(value):
                cells = [c for _, c in _rows("", part)] if isinstance(part, dict) else [str(part)]
                rows.append((f"{label} {number}", ", ".join(cells)))
            if not value:
                rows.append((label, "none"))
        elif name.endswith("_bytes"):
            rows.append((label, f"{value / 1e9:.1f} GB"))
        else:
            words = {None: "none", True: "yes", False: "no"}
            rows.append((label, str(words.get(value, value))))
    return rows
