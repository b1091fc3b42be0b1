"""Page of `paceline tune`: the chosen setting and everything that was tested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.schema import family, setting
from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, models, sampling_words, source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.bench.sequential_test import Tried, TuneConfig
    from paceline.bench.tune import Tuned
    from paceline.decode.strategies import DecodingConfig
    from paceline.report.html.page import Block, Row

_SPEED = Axis("speedup", "speedup", ".2f", bounds=True)
_TITLES = {"choosing": "To choose", "confirming": "To confirm, on other examples"}


def tune_page(found: Tuned, environment: Mapping[str, object] | None = None) -> Page:
    """The page of a tuned setting."""
    wanted = found.config
    config = wanted.model_dump(mode="json")
    source = source_of("tune", wanted, environment)
    absolute = wanted.absolute_quality is not None
    rows = [_line(one, absolute=absolute) for one in found.tried]
    quality = Axis("quality", "quality" if absolute else "quality / target's", ".2f", bounds=True)
    floor = wanted.absolute_quality if absolute else wanted.quality_floor
    least = None if wanted.max_latency is None else 1 / wanted.max_latency
    families = list(dict.fromkeys(row["family"] for row in rows))
    panels: list[Panel] = []
    for step, title in _TITLES.items():
        mine = [row for row in rows if row["examples"] == step]
        if mine:
            chart = charts.frontier(
                *(mine, _SPEED, quality, "family"),
                labels=["setting", "met"],
                reference=(least or 1.0, floor or 1.0),
                names=families,
            )
            panels.append(Panel(chart, title))
    text = (
        "Each point is a setting. Candidates are measured on the choosing examples; the best are "
        "tested on the confirming ones. Dashed: the bound and the target alone."
    )
    columns = {
        "lower limit": "lower confidence limit of the bounded figure on the confirming examples.",
        "met": "whether the bound is met; on confirming examples, by the lower limit or by proof.",
    }
    blocks: list[Block] = [
        Figure("Tested settings", text, panels, rows, source),
        Table("All measurements", rows, source, columns=columns),
    ]
    if found.failed:
        failed = [{"setting": _name(cell.decoding), "reason": cell.error} for cell in found.failed]
        blocks.append(Table("Failed settings", failed, source))
    terms = ("speedup", "relative quality", "quality", "family", "95% interval", "lossless")
    return Page(
        title="The best setting within a bound",
        verdict=_verdict(found),
        word="",
        facts=_facts(found),
        sections=[Section("Settings", blocks, terms)],
        about=[
            found.statement,
            *models(config),
            f"Task: {config['task']['task']}, {sampling_words(config['sampling'])}",
            *([line] if (line := machine(environment)) else []),
        ],
    )


def _verdict(found: Tuned) -> str:
    chosen = found.chosen
    speed = chosen.speedup
    words = f"{speed.value:.2f}x ({speed.low:.2f} to {speed.high:.2f}) the target's speed"
    name = _name(chosen.decoding)
    if family(chosen.decoding) == "autoregressive":
        return f"No setting is better than decoding without a draft, within {_bound(found.config)}."
    quality = ""
    if (relative := chosen.relative_quality) is not None:
        quality = f" and {relative.value:.3f} of its quality"
    return f"Use {name}: {words}{quality}, within {_bound(found.config)}."


def _bound(wanted: TuneConfig) -> str:
    if wanted.quality_floor is not None:
        return f"a quality of at least {wanted.quality_floor:g} of the target's"
    if wanted.absolute_quality is not None:
        return f"a quality of at least {wanted.absolute_quality:g}"
    return f"a time per token of at most {wanted.max_latency:g} of the target's"


def _facts(found: Tuned) -> list[Fact]:
    settings = {_name(one.decoding) for one in found.tried}
    return [
        Fact("settings measured", str(len(settings))),
        Fact("tested on other examples", str(found.num_tests)),
        Fact("confidence", f"{found.config.confidence:g}"),
        Fact("examples", f"{found.config.num_examples} + {found.config.num_confirmed}"),
    ]


def _line(one: Tried, *, absolute: bool) -> Row:
    quality = one.quality if absolute else one.relative_quality
    return {
        "family": family(one.decoding),
        "setting": setting(one.decoding) or "-",
        "examples": one.examples,
        **({"quality": None} if quality is None else bounded("quality", quality)),
        **bounded("speedup", one.speedup),
        "lower limit": one.lower_limit,
        "met": one.met,
    }


def _name(decoding: DecodingConfig) -> str:
    return f"{family(decoding)} {setting(decoding)}".strip()
