"""Counters that servers publish at /metrics, in the Prometheus text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engines.contract import BlockCounts
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

_TOTAL = "_total"


def read_counters(text: str, prefix: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name without prefix and `_total`: labels and value of each.

    Raises:
        EngineError: This is no such text.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        families: Iterable[Metric] = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise EngineError(f"/metrics is not in the Prometheus format ({error})") from error
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(prefix):
                name = sample.name.removeprefix(prefix).removesuffix(_TOTAL)
                found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def block_counts(text: str, prefix: str) -> BlockCounts | None:
    """The counters of speculative decoding of vLLM and llama-server, which share their names.

    None: the server has none, so it does not draft.

    Raises:
        EngineError: This is no text of counters.
    """
    found = read_counters(text, prefix)
    if "spec_decode_num_drafts" not in found:
        return None

    def total(name: str) -> int:
        return round(sum(value for _, value in found.get(f"spec_decode_num_{name}", ())))

    by_position: dict[int, float] = {}
    for labels, value in found.get("spec_decode_num_accepted_tokens_per_pos", ()):
        place = int(labels.get("position", -1))
        by_position[place] = by_position.get(place, 0) + value
    return BlockCounts(
        num_blocks=total("drafts"),
        num_drafted=total("draft_tokens"),
        num_accepted=total("accepted_tokens"),
        accepted_by_position=tuple(round(by_position[place]) for place in sorted(by_position))
        or None,
    )
