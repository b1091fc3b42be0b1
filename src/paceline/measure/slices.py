"""Slices of the prompts, by a column or by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import StrictModel
from paceline.data.prompts import read_columns
from paceline.errors import PromptError
from paceline.measure.results import gamma_of
from paceline.measure.verdict import Verdict, decide_by_expected
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.data import CorpusConfig
    from paceline.results.row import Row

LENGTH = "prompt_tokens"
"""The slice of prompts by their length, which needs no column."""
_MOST_VALUES = 20
_FIRST, _FACTOR = 16, 4  # bins of lengths: 1 to 16, 17 to 64, 65 to 256, ...
SHOWN = ("expected_acceptance", "block_efficiency", "expected_speedup")


class Slice(StrictModel):
    """Prompts that share a value.

    Attributes:
        name: The column, or `prompt_tokens`.
        value: The value, or a range of lengths in tokens.
        units: Numbers of the prompts.
    """

    name: str
    value: str
    units: tuple[int, ...]


class Sliced(NamedTuple):
    """A slice with its own row at the gamma of its own verdict, by expected speedups."""

    slice: Slice
    row: Row
    verdict: Verdict


def slices_of(
    names: Sequence[str], corpus: CorpusConfig, prompts: Sequence[Sequence[int]]
) -> list[Slice]:
    """The slices of the first prompts of a corpus, in order of appearance; lengths ascend.

    Raises:
        PromptError: a row lacks a column, or a column has more than 20 values.
    """
    columns = [name for name in names if name != LENGTH]
    chosen = corpus.first(len(prompts))
    found = [values for values, _ in read_columns(chosen, columns)] if columns else []
    slices: list[Slice] = []
    for name in names:
        if name == LENGTH:
            ends = [_bin_end(len(prompt)) for prompt in prompts]
            labels, order = list(map(_range, ends)), list(map(_range, sorted(set(ends))))
        else:
            labels = [str(values[name]) for values in found]
            order = list(dict.fromkeys(labels))
        if len(order) > _MOST_VALUES:
            raise PromptError(
                f"column {name} of {corpus.path} has {len(order)} values in {len(prompts)} "
                f"prompts; wanted a column with at most {_MOST_VALUES}"
            )
        for value in order:
            units = tuple(unit for unit, label in enumerate(labels) if label == value)
            slices.append(Slice(name=name, value=value, units=units))
    return slices


def judged(slices: Sequence[Slice], blocks: Sequence[Row], disturbed: str) -> Iterator[Sliced]:
    """The slices with their verdicts, each by itself; `blocks`: of the scored texts by gamma."""
    for one in slices:
        own = [row.only(one.units) for row in blocks]
        acceptance = FIGURES["expected_acceptance"].measure(own[0])
        verdict = decide_by_expected(acceptance, own, disturbed=disturbed)
        row = next(row for row in own if gamma_of(row) == verdict.gamma)
        yield Sliced(one, row.extended(slice=f"{one.name} {one.value}"), verdict)


def as_objects(found: Sequence[Sliced]) -> list[dict[str, Any]]:
    """The slices with figures and verdicts as JSON values."""
    return [
        {"name": one.slice.name, "value": one.slice.value, "verdict": one.verdict.word}
        | {"gamma": one.verdict.gamma, "num_prompts": len(one.slice.units)}
        | {name: FIGURES[name].measure(one.row).as_object() for name in SHOWN}
        for one in found
    ]


def _bin_end(length: int) -> int:
    end = _FIRST
    while end < length:
        end *= _FACTOR
    return end


def _range(end: int) -> str:
    return f"{1 if end == _FIRST else end // _FACTOR + 1} to {end}"
