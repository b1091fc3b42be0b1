"""The table of `generate-data --plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from paceline.core.bootstrap import Interval

if TYPE_CHECKING:
    from paceline.data.distillation_data import Range, RunPlan

_LEGEND = """\
tokens, generated: answers times the mean length of the measured ones. size: of the files in
OUTPUT/data. time: of one worker, with all its servers; N workers on hardware of their own take 1/N.
Brackets: 95% intervals over the measured answers."""


def plan_table(found: RunPlan) -> Group:
    """What a run will take."""
    head = (
        f"{found.num_measured:,} answers measured in {found.measured_s:.0f} s: "
        f"{found.tokens_per_s:,.1f} tokens/s, {found.bytes_per_token:.1f} bytes per token"
    )
    table = Table("", "whole run", box=None, pad_edge=False)
    table.add_row("answers", f"{found.num_records:,}")
    table.add_row("tokens in prompts", f"{found.prompt_tokens:,}")
    table.add_row("tokens, generated", _cell(found.new_tokens, ",.0f"))
    if found.hours.value < 1:
        table.add_row("minutes", _cell(found.hours.scaled(60), ",.1f"))
    else:
        table.add_row("hours", _cell(found.hours, ",.1f"))
    if found.bytes.value < 1e9:
        table.add_row("size, MB", _cell(found.bytes.scaled(1e-6), ",.1f"))
    else:
        table.add_row("size, GB", _cell(found.bytes.scaled(1e-9), ",.1f"))
    if found.cost is not None:
        table.add_row("cost, as --price", _cell(found.cost, ",.2f"))
    return Group(head, table, _LEGEND)


def _cell(found: Range, form: str) -> str:
    return Interval(found.value, found.low, found.high).text(form)
