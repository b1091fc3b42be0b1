"""Page of `paceline decode`: the text with accepted, recovered and bonus tokens."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, TextPicture, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.report.html.page import Block, Row


def decode_page(found: Mapping[str, Any]) -> Page:
    """The page of the output of `decode --json`."""
    stats = found["stats"]
    source = source_of(_command(found), found.get("decoding"))
    tokens = [
        Token(text, name, number)
        for number, block in enumerate(found["blocks"])
        for text, name in block
    ]
    emitted = sum(stats[f"num_{name}"] for name in ("accepted", "recovered", "bonus"))
    emitted += stats["num_kept"] + stats["num_deferred"]
    calls, examined = stats["num_blocks"], stats["num_accepted"] + stats["num_recovered"]
    facts = [Fact("tokens", str(len(tokens)), f"{found['tokens_per_s']:.1f} per second")]
    if calls:
        facts.append(Fact("tokens per target call", f"{emitted / calls:.2f}"))
    if examined:
        rate = f"{stats['num_accepted'] / examined:.0%}"
        detail = f"{stats['num_accepted']} of {examined} examined"
        facts.append(Fact("acceptance rate", rate, detail))
    text = "Each colour and underline is a source of tokens; a vertical bar ends a block."
    picture = TextPicture(
        "Where each token came from", text, tokens, source, found.get("prompt", "")
    )
    blocks: list[Block] = [picture]
    if len(histogram := stats["accepted_histogram"]) > 1:
        rows: list[Row] = [{"accepted": n, "blocks": count} for n, count in enumerate(histogram)]
        chart = charts.columns(
            rows,
            Axis("accepted", "accepted tokens in the block", "d", whole=True),
            Axis("blocks", "blocks", "d", zero=True, whole=True),
        )
        text = "How many drafted tokens each block kept."
        blocks.append(Figure("Accepted tokens per block", text, [Panel(chart)], rows, source))
    terms = ("accepted", "recovered", "bonus", "acceptance rate", "block efficiency", "gamma")
    return Page(
        title="Decoded text",
        verdict=_verdict(len(tokens), emitted, calls, stats),
        facts=facts,
        sections=[Section("Text", blocks, terms)],
    )


def _command(found: Mapping[str, Any]) -> str:
    """The command without its prompt, which the page shows."""
    options = {
        "--target": found.get("target"),
        "--draft": found.get("draft"),
        "--max-new-tokens": found.get("max_new_tokens"),
        "--seed": found.get("seed"),
    }
    given = {name: value for name, value in options.items() if value is not None}
    return " ".join(["decode", *(f"{name} {shlex.quote(str(v))}" for name, v in given.items())])


def _verdict(tokens: int, emitted: int, calls: int, stats: Mapping[str, Any]) -> str:
    if not stats["num_drafted"]:
        return f"{tokens} tokens without a draft, one per target call."
    return (
        f"{tokens} tokens took {calls} target calls after the prompt, {emitted / calls:.2f} tokens "
        f"per call: {stats['num_accepted']} of {stats['num_drafted']} drafted tokens were accepted."
        if calls
        else f"{tokens} tokens, all of the draft's own."
    )
