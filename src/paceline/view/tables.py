"""Tables of results, which pages and the terminal share."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paceline.bench.answers import family, setting
from paceline.core.bootstrap import Interval
from paceline.measure.results import num_tokens
from paceline.measure.slices import SHOWN
from paceline.measure.trajectory import START, draft_name, gain_of
from paceline.results.figures import FIGURES
from paceline.results.frontier import measure
from paceline.view.page import Table, case_of, number, sampling_words, table_of, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.sequential_test import Step
    from paceline.bench.tune import Tuned
    from paceline.decode.strategies import DecodingConfig
    from paceline.measure import Measurement
    from paceline.measure.analysis import PredictedFrontier
    from paceline.measure.engine_costs import EngineCosts
    from paceline.measure.measurement import DraftComparison
    from paceline.measure.served import ServedMeasurement
    from paceline.measure.slices import Slice
    from paceline.measure.speculators import SpeculatorTable
    from paceline.results.row import Row
    from paceline.view.page import Line

_ENDS = ("_low", "_high")
_SPEEDUPS = ("needed_block_efficiency", "predicted_speedup", "expected_speedup", "mbsu")
_IN_ENGINE = ("block_efficiency", "needed_block_efficiency", "break_even_acceptance")


def gamma_table(found: Measurement, *, with_intervals: bool = False) -> Table:
    """A line per gamma: tokens per target call, what a speedup needs, and expected speedups.

    Without costs, the figures that need them are left out.
    """
    rows = found.blocks
    figures = ("block_efficiency", "break_even_acceptance", *_SPEEDUPS)
    if found.engine:
        figures = (*_IN_ENGINE, "expected_speedup")
    table = table_of(
        rows,
        ("gamma",),
        figures,
        bare=() if with_intervals else figures,
        title="Predictions for each gamma" if with_intervals else "",
        units="prompts",
    )
    lines: list[Line] = []
    for row, line in zip(rows, table.rows, strict=True):
        gamma = row.setting["gamma"]
        named = line | {"gamma": f"{gamma}*" if gamma == found.best_gamma else str(gamma)}
        if "break_even_acceptance" not in row.totals:
            named["break_even_acceptance"] = "none"
        if found.engine:
            named["block"] = f"{row.totals['block_s'] * 1e3:.1f} ms"
        lines.append(named)
    columns = {"*": "the gamma of the verdict."} if found.best_gamma else {}
    if found.engine:
        columns["block"] = "time per block in the engine, drafting included."
    return dataclasses.replace(table, rows=lines, columns=columns)


def slices_table(found: Measurement) -> Table | None:
    """A line per slice, with its own verdict by expected speedups; None without slices."""
    sliced = found.sliced
    if not sliced:
        return None
    rows = [one.row.extended(verdict=one.verdict.word) for one in sliced]
    return table_of(
        rows,
        ("slice", "verdict", "gamma"),
        SHOWN,
        title="Slices of the prompts",
        text="Each verdict is by itself, on expected speedups.",
        units="prompts",
    )


def speculators_table(found: SpeculatorTable) -> Table:
    """A line per method and number of concurrent requests."""
    lines: list[Line] = []
    for cell in found.cells():
        row, speedup = cell.row, cell.speedup
        values = {name: FIGURES[name].value(row) for name in ("tokens_per_s", "block_efficiency")}
        lines.append(
            {"at once": row.setting["concurrency"], "method": row.setting["method"], **values}
            | {"speedup": speedup, "verdict": cell.verdict.word if cell.verdict else None}
        )
    return Table(
        "Methods of speculative decoding",
        lines,
        text="Speedups are of the seconds per token of whole groups of requests.",
        units="groups of requests",
    )


def drafts_table(found: DraftComparison) -> Table:
    """A line per figure and draft, with the difference to the first draft."""
    first, config = found.measurements[0], found.measurements[0].config
    sampled = sampling_words(vars(config.sampling))
    lines: list[Line] = [
        line._asdict() | {"figure": words_of(line.figure)} for line in found.compared()
    ]
    return Table(
        "",
        lines,
        text=f"On the same {num_tokens(first.texts)} tokens of the target after "
        f"{len(first.texts.units)} prompts, {sampled}.",
        columns={
            "gamma": "of tokens per target call, that of the first draft; of a speedup, the "
            "draft's own.",
            "value": "with its interval over prompts, and that of the costs of blocks.",
            "difference": f"less the figure of {config.draft}, paired by prompt; costs count as "
            "exact.",
        },
        units="prompts",
        once=("figure",),
    )


_OF_RULES = ("expected_rejection_rate", "output_tvd", "output_kl", "surprisal")
_OF_RULES += ("block_efficiency", "expected_speedup")


def frontier_table(found: PredictedFrontier, of: Slice | None = None) -> Table:
    """A line per rule, at the gamma with the highest expected speedup, in a slice."""
    rows = found.fastest(of)
    table = table_of(
        rows,
        ("gamma",),
        _OF_RULES,
        bare=_OF_RULES[1:],
        text=(
            f"{'' if of is None else f'{of.name} {of.value}. '}"
            "Each rule at the gamma of its largest expected speedup, on "
            f"{sum(filter(None, rows[0].sums['tokens'])):.0f} tokens of the target, "
            f"{sampling_words(vars(found.config.sampling))}, {found.config.prompt_words}; a draft "
            f"pass takes {rows[0].totals['cost_ratio']:.3f} of a target pass."
        ),
        units="texts",
        formats={_OF_RULES[0]: ".2f"},
    )
    infinite = {"output_kl": math.inf}  # of a rule whose output lacks possible tokens
    lines = [
        {"rule": row.setting["label"]} | line | ({} if "output_kl" in row.sums else infinite)
        for row, line in zip(rows, table.rows, strict=True)
    ]
    return dataclasses.replace(table, rows=lines)


def served_tables(found: ServedMeasurement) -> list[Table]:
    """An engine's counters beside the prediction: of all blocks, then of each position in them."""
    rows = found.rows
    whole = [row for row in rows if "counts" in row.setting and "position" not in row.setting]
    positions = [row for row in rows if "position" in row.setting]
    positions.sort(key=lambda row: row.setting["position"])
    columns = {
        "counts": "served: by the engine's counters; predicted: from the probabilities of both "
        "models on the texts that the engine generated."
    }
    settings = {"units": "requests", "columns": columns}
    reported = any(row.has(counts="served") for row in positions)
    text = "" if reported else "The engine does not report its counts by position."
    figures = ("block_efficiency", "draft_acceptance_rate")
    return [
        table_of(whole, ("counts",), figures, text=text, **settings),
        table_of(
            positions,
            ("position", "counts"),
            ("position_acceptance",),
            once=("position",),
            **settings,
        ),
    ]


def steps_table(costs: EngineCosts) -> Table:
    lines: list[Line] = []
    for step in costs.steps:
        ends = (1e3 * step.seconds.value, 1e3 * step.seconds.low, 1e3 * step.seconds.high)
        line: Line = {"requests at a time": str(step.batch_size), "gamma": step.gamma}
        lines.append(line | {"ms per step": Interval(*ends)})
    columns = {
        "gamma": "drafted tokens per block; 0: without the draft.",
        "ms per step": "time of an engine step for all requests; brackets: 95% intervals.",
    }
    return Table("", lines, columns=columns, formats={"ms per step": ".1f"})


def trajectory_tables(rows: Sequence[Row]) -> list[Table]:
    """A table per task and sampling, with a line per checkpoint and gamma."""
    cases: dict[str, list[Line]] = {}
    for row in rows:
        label = "" if row.has(label=START) else f" {row.setting['label']}"
        line = {"draft": f"{draft_name(row)}{label}"} | checkpoint_line(row, rows)
        line["expected_acceptance"] = number(line, "expected_acceptance")
        cases.setdefault(case_of(row), []).append(line)
    forms = dict.fromkeys(("quality", "block_efficiency", "mbsu"), ".2f")
    once = ("draft", "quality", "expected_acceptance")
    settings = {"formats": forms, "units": "prompts", "once": once}
    return [Table(case, lines, **settings) for case, lines in cases.items()]


def checkpoint_line(row: Row, rows: Sequence[Row]) -> Line:
    """The figures of a draft in training; `rows` has the run's initial draft, too."""
    first = [name for name in ("quality", "expected_acceptance") if FIGURES[name].is_in(row)]
    line: Line = {name: FIGURES[name].measure(row) for name in first}
    line |= {"gamma": row.setting["gamma"]}
    line |= {"block_efficiency": FIGURES["block_efficiency"].measure(row)}
    return line | {"gain": gain_of(row, rows), "mbsu": FIGURES["mbsu"].value(row)}


def before_and_after(
    before: Mapping[str, float] | None,
    after: Mapping[str, float],
    figures: Sequence[str],
    title: str = "",
) -> Table:
    """A line per figure on held-out text, which evaluations before and after training have."""
    lines: list[Line] = [
        {
            "figure": words_of(name),
            "before": evaluated(before or {}, name),
            "after": evaluated(after, name),
        }
        for name in figures
    ]
    return Table(title, lines, units="texts")


def evaluated(figures: Mapping[str, float], name: str) -> Interval | None:
    """A figure of an evaluation with its interval; None if it is not among them."""
    if name not in figures:
        return None
    return Interval(figures[name], *(figures.get(name + end, math.nan) for end in _ENDS))


def tuned_tables(found: Tuned) -> list[Table]:
    """A line per measured setting: of the choosing examples, then of the confirming ones."""
    costs = found.config.costs
    text = "" if costs is None else f"Speedups are from the engine's step costs in {costs}."
    columns = {
        "lower limit": "lower confidence limit of the bounded figure.",
        "met": "whether the bound is met: by the figure on the choosing examples, by the lower "
        "limit or by proof on the confirming ones.",
    }
    steps: dict[Step, str] = {
        "choosing": "On the choosing examples",
        "confirming": "On other examples, to confirm",
    }
    tables: list[Table] = []
    for step, title in steps.items():
        own = [_tried(row) for row in found.rows(step)]
        forms = dict.fromkeys(("quality", "relative_quality"), ".2f")
        settings = {"columns": columns, "formats": forms, "units": "examples"}
        tables.append(Table(title, own, text=text, **settings))
        text = ""
    failed = [{"setting": name_of(one.decoding), "reason": one.error} for one in found.failed]
    return [*tables, *([Table("Failed settings", failed)] if failed else [])]


def name_of(decoding: DecodingConfig) -> str:
    """Family and setting of a cell."""
    return f"{family(decoding)} {setting(decoding)}".strip()


def _tried(row: Row) -> Line:
    line: Line = {"family": row.setting["family"], "setting": row.setting.get("setting", "-")}
    for name in ("relative_quality", "speedup"):
        found = measure(name, row)
        line[name] = None if math.isnan(found.value) else found
    if row.has(examples="confirming"):
        line["lower limit"] = row.totals.get("lower_limit")
    return line | {"met": row.setting["met"]}
