"""Parser for the counters that servers publish at /metrics in the Prometheus text format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.engines.client import shorten
from paceline.engines.contract import BlockCounts
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

_LONGEST = 4 << 20


def read_counters(text: str, prefix: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and value of each sample, by name without `prefix` and `_total`."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    if len(text) > _LONGEST:  # the parser makes an object of each line
        raise EngineError(f"/metrics has more than {_LONGEST:,} characters; is this the engine?")
    try:
        families: Iterable[Metric] = list(text_string_to_metric_families(text))
    except ValueError as error:
        fault = shorten(str(error))
        raise EngineError(f"/metrics is not in the Prometheus format ({fault})") from error
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(prefix):
                if not math.isfinite(sample.value):
                    raise EngineError(f"/metrics has {sample.name} = {sample.value}")
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def block_counts(text: str, prefix: str) -> BlockCounts | None:
    """Return the speculative-decoding counters of vLLM or llama-server; None if it has none."""
    found = read_counters(text, prefix)
    if "spec_decode_num_drafts" not in found:
        return None

    def total(name: str) -> int:
        return round(sum(value for _, value in found.get(f"spec_decode_num_{name}", ())))

    by_position: dict[int, float] = {}
    for labels, value in found.get("spec_decode_num_accepted_tokens_per_pos", ()):
        text = labels.get("position", "")[:9]
        position = int(text) if text.isdecimal() else -1
        by_position[position] = by_position.get(position, 0) + value
    return BlockCounts(
        num_blocks=total("drafts"),
        num_drafted=total("draft_tokens"),
        num_accepted=total("accepted_tokens"),
        accepted_by_position=tuple(round(by_position[i]) for i in sorted(by_position)) or None,
    )
