"""Plots: which cells a line joins, that families can be told apart, that files come out."""

import struct
import sys
from pathlib import Path

import pytest

from paceline.bench.measured_frontier import Frontier
from paceline.bench.schema import ResultRow
from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.decode.draft_policies import Adaptive, Confident
from paceline.decode.strategies import (
    BigLittle,
    Oracle,
    ResponseByResponse,
    Speculative,
    TokenByToken,
)
from paceline.errors import UsageError
from paceline.report import plots, write_report
from result_rows import ALONE, example, row, steady, write_rows

BY_THRESHOLD = (Chow, ChowLog, Diff, DiffLog, Opt, OptLog, TokenV1, TokenV2, TokenV3)


def every_family() -> list[ResultRow]:
    rules = [rule(alpha) for rule in BY_THRESHOLD for alpha in (0.2, 0.6)]
    rules += [Lossy(alpha, beta) for alpha in (0.2, 0.6) for beta in (1.0, "tuned")]
    rules += [Lenient(kind, 0.5) for kind in ("linear", "square", "exponential")]
    judged = [example(0.5, 0.5, examined=10, rejected=number) for number in (1, 2, 3)]
    rows = [row(rule, judged, gamma=gamma) for rule in rules for gamma in (1, 4)]
    others = [
        *(TokenByToken(alpha=0.2), ResponseByResponse(alpha=0.2)),
        *(ResponseByResponse(alpha=0.2, normalise=True), BigLittle(fallback=0.5, rollback=1.0)),
        *(Oracle(rule=Diff(0.2)), Oracle(rule=Diff(0.4))),
    ]
    rows += [row(strategy, judged) for strategy in (Lossless(), BiLDRule(1.0), *others)]
    return [row(ALONE, judged), *rows]


def test_a_line_joins_the_cells_of_one_gamma_by_their_threshold():
    alphas = (0.9, 0.1, 0.5)
    cells = [steady(Chow(alpha), gamma=gamma) for alpha in alphas for gamma in (4, 1)]
    found = plots.curves(Frontier([steady(ALONE), *cells]))
    drawn = [(curve.name, curve.number) for curve in found]
    assert drawn == [("chow", 0), ("chow", 1)]
    for curve, gamma in zip(found, (1, 4), strict=True):
        settings = [
            (cell.decoding.strategy.num_speculative_tokens, cell.decoding.strategy.rule.alpha)  # pyright: ignore
            for cell in curve.cells
        ]
        assert settings == [(gamma, 0.1), (gamma, 0.5), (gamma, 0.9)]


def test_a_line_of_bild_joins_the_cells_of_one_fallback():
    cells = [
        steady(BigLittle(fallback=fallback, rollback=rollback))
        for fallback in (0.3, 0.7)
        for rollback in (4.0, 1.0)
    ]
    found = plots.curves(Frontier([steady(ALONE), *cells]))
    assert [[cell.decoding.strategy.rollback for cell in curve.cells] for curve in found] == [  # pyright: ignore
        [1.0, 4.0],
        [1.0, 4.0],
    ]


def test_no_two_families_share_a_colour_or_a_marker():
    curves = plots.curves(Frontier(every_family()))
    names = list(dict.fromkeys(curve.name for curve in curves))
    spare: dict[str, int] = {}
    styles = [plots.style(name, spare) for name in names if not name.startswith("oracle")]
    assert spare == {}
    assert len({colour for colour, _ in styles}) == len(styles) == 20
    assert len({marker for _, marker in styles}) == len(styles)


def test_a_family_that_is_not_in_the_papers_has_a_style_of_its_own():
    known = {plots.style(curve.name, {}) for curve in plots.curves(Frontier(every_family()))}
    spare: dict[str, int] = {}
    others = [plots.style(name, spare) for name in ("chow confident", "diff confident")]
    assert len({*known, *others}) == len(known) + 2
    assert plots.style("chow confident", spare) == others[0]


@pytest.mark.slow
def test_plots_come_out_as_png_and_svg(tmp_path: Path):
    write_report(write_rows(tmp_path, every_family()))
    png = (tmp_path / "plots/temperature-1.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1600, 900)
    svg = (tmp_path / "plots/temperature-1.svg").read_text()
    for words in ("token_v3", "the target alone", "relative latency", "rejection rate", "gamma 4"):
        assert words in svg, words


def test_other_policies_and_a_lonely_target_can_be_drawn(tmp_path: Path):
    policies = [Confident(0.5), Adaptive(0.1)]
    cells = [steady(Speculative(rule=Chow(0.2), policy=policy)) for policy in policies]
    for number, rows in enumerate(([], cells)):
        folder = write_rows(tmp_path / str(number), [steady(ALONE), *rows])
        write_report(folder)
        assert (folder / "plots/temperature-1.png").stat().st_size > 10_000


def test_without_matplotlib_one_line_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_rows(tmp_path, [steady(ALONE), steady(Chow(0.2))])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[report\]'") as error:
        write_report(tmp_path)
    assert "\n" not in str(error.value)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["report.md", "results.jsonl"], "all that needs no plots is there"
