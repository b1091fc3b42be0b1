"""Sources of rows: the command and configuration of a run, from its manifest or its result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.config import StrictModel
from paceline.report.html.page import Source

if TYPE_CHECKING:
    from collections.abc import Mapping


def source_of(
    command: str,
    config: StrictModel | Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None = None,
) -> Source:
    """A source whose command reads the configuration from a file that the page offers."""
    if config is None:
        return Source(f"paceline {command}", None, environment)
    values = json.loads(config.model_dump_json()) if isinstance(config, StrictModel) else config
    file = command.split()[0] + ".yaml"
    return Source(f"paceline {command} --config {file}", values, environment)


def machine(environment: Mapping[str, Any] | None) -> str:
    """The machine in one line; empty if it is unknown."""
    if not environment:
        return ""
    parts = [f"{environment.get('cpu_count', '?')} CPUs", environment.get("processor", "")]
    versions = environment.get("versions") or {}
    parts += [f"{name} {versions[name]}" for name in ("paceline", "torch") if name in versions]
    return "Machine: " + ", ".join(str(part) for part in parts if part)


def models(config: Mapping[str, Any]) -> list[str]:
    """Target and draft of a configuration, one line each."""
    return [
        f"{name.capitalize()}: {config[name]}" for name in ("target", "draft") if config.get(name)
    ]


def sampling_words(sampling: Mapping[str, Any]) -> str:
    """Sampling parameters in words, such as `temperature 0.7, top-p 0.9`."""
    parts = [f"temperature {sampling.get('temperature', 1):g}"]
    if sampling.get("top_p", 1) < 1:
        parts.append(f"top-p {sampling['top_p']:g}")
    if sampling.get("top_k"):
        parts.append(f"top-k {sampling['top_k']}")
    if sampling.get("repetition_penalty", 1) != 1:
        parts.append(f"repetition penalty {sampling['repetition_penalty']:g}")
    return ", ".join(parts)
