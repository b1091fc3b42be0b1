"""Page of `paceline verify`: whether decoding with the draft is lossless."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import models, sampling_words, source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table

if TYPE_CHECKING:
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.report.html.page import Block, Row, Source

_DEVIATIONS = 1.96  # standard deviations that contain 95% of a normal distribution


def verify_page(found: LosslessnessReport) -> Page:
    """The page of a test of losslessness."""
    config = found.config.model_dump(mode="json")
    source = source_of("verify", found.config)
    sampled = found.distribution
    return Page(
        title="Is decoding with this draft lossless?",
        word="PASSED" if found.passed else "FAILED",
        tone="good" if found.passed else "bad",
        verdict=_verdict(found),
        facts=[
            Fact(
                "greedy texts equal",
                f"{found.greedy.num_identical} of {found.greedy.num_prompts}",
                f"{found.greedy.num_tokens} tokens",
            ),
            Fact("G-test", f"p {sampled.p_value:.2g}", f"fails below {sampled.false_alarm:g}"),
            Fact("sampled tokens", f"{sampled.num_tokens:,}"),
        ],
        sections=[_greedy(found, source), _sampled(found, source)],
        about=[
            *models(config),
            f"Compared with {found.reference}",
            f"{sampling_words(config['sampling'])}, gamma {found.config.gamma}",
        ],
    )


def _verdict(found: LosslessnessReport) -> str:
    greedy, sampled = found.greedy, found.distribution
    if not greedy.passed:
        return f"The greedy texts differ: {greedy.first_difference}."
    if sampled.num_impossible:
        return (
            f"{sampled.num_impossible} of {sampled.num_tokens} sampled tokens have probability 0 "
            "under the target."
        )
    if not sampled.passed:
        return (
            "The sampled tokens do not follow the target's distribution: p "
            f"{sampled.p_value:.2g}, below {sampled.false_alarm:g}."
        )
    if not found.passed:
        return "Both tests pass, but so does the broken rule: sample more tokens."
    text = (
        f"All {greedy.num_prompts} greedy texts equal the target's, and {sampled.num_tokens:,} "
        f"sampled tokens follow its distribution (p {sampled.p_value:.2g})"
    )
    if greedy.num_ties:
        text = (
            f"{greedy.num_identical} of {greedy.num_prompts} greedy texts equal the target's, "
            f"{greedy.num_ties} differ at a tie of its logits, and {sampled.num_tokens:,} sampled "
            f"tokens follow its distribution (p {sampled.p_value:.2g})"
        )
    caught = "; the same test rejects a broken rule" if found.broken_distribution else ""
    return f"{text}{caught}."


def _greedy(found: LosslessnessReport, source: Source) -> Section:
    greedy = found.greedy
    rows: list[Row] = [
        {
            "texts": greedy.num_prompts,
            "tokens": greedy.num_tokens,
            "equal": greedy.num_identical,
            "differ at a tie": greedy.num_ties,
            "first difference": greedy.first_difference or "none",
        }
    ]
    text = (
        "Each prompt is decoded at temperature 0 with the draft, and compared with the greedy text "
        f"of {found.reference}. Texts may differ "
        f"after two logits closer than {found.config.tie:g}, which rounding can exchange."
    )
    return Section("Greedy texts", [Table("Token by token", rows, source, text)], ("lossless",))


def _sampled(found: LosslessnessReport, source: Source) -> Section:
    blocks: list[Block] = [_cells(found.distribution, "Tokens in each cell", source)]
    if found.broken_distribution is not None:
        title = "The same test of a broken rule, which must fail"
        blocks.append(_cells(found.broken_distribution, title, source))
    checks = {"lossless rule": found.distribution, "broken rule": found.broken_distribution}
    rows: list[Row] = [
        {
            "test": name,
            "passed": check.passed,
            "G": check.g_statistic,
            "p": check.p_value,
            "tokens": check.num_tokens,
            "impossible tokens": check.num_impossible,
            "excluded at a border": check.num_border,
        }
        for name, check in checks.items()
        if check is not None
    ]
    columns = {
        "impossible tokens": "tokens of probability 0 under the target.",
        "excluded at a border": "tokens that rounding can move across the limit of top-k or top-p.",
    }
    blocks.append(Table("G-tests", rows, source, columns=columns))
    return Section("Sampled tokens", blocks, ("G-test", "cell of the G-test"))


def _cells(check: DistributionCheck, title: str, source: Source) -> Figure:
    counts = check.cell_counts
    expected = sum(counts) / len(counts)
    spread = _DEVIATIONS * (expected * (1 - 1 / len(counts))) ** 0.5
    rows: list[Row] = [
        {"cell": number, "tokens": count, "expected": expected}
        for number, count in enumerate(counts, 1)
    ]
    chart = charts.columns(
        rows,
        Axis("cell", "cell", "d", whole=True),
        Axis("tokens", "tokens", "d", zero=True, whole=True),
        reference=expected,
        band=(max(0.0, expected - spread), expected + spread),
    )
    text = (
        f"A lossless rule puts {expected:.1f} tokens into each cell (dashed); 95% of cells lie in "
        "the shaded range. The first cells hold the tokens that the draft overrates most."
    )
    return Figure(title, text, [Panel(chart)], rows, source)
