"""One decoding setting that answers the examples, and its result row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paceline.bench.schema import Baseline, ExampleRow, ResultRow
from paceline.errors import PacelineError
from paceline.tasks.base import CorpusFigures, corpus_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.workbench import PromptSet
    from paceline.decode.strategies import DecodingConfig


def failed_row(prompts: PromptSet, decoding: DecodingConfig, error: Exception) -> ResultRow:
    """The row of a cell that failed before it answered."""
    cell = Cell(prompts, decoding, lambda _: _raise(error))
    cell.answer(0)
    return cell.row()


def _raise(error: Exception) -> NoReturn:
    raise error


class Cell:
    """A cell that answers examples in any order, and stops at its first error."""

    def __init__(
        self,
        prompts: PromptSet,
        decoding: DecodingConfig,
        answer: Callable[[Sequence[int]], list[ExampleRow]],
    ) -> None:
        """`answer`: answers the examples with these indices."""
        self._prompts = prompts
        self._decoding = decoding
        self._answer = answer
        self._answers: dict[int, ExampleRow] = {}
        self._error: str | None = None

    @property
    def has_failed(self) -> bool:
        """True after its first error."""
        return self._error is not None

    def answer(self, *numbers: int) -> None:
        """Answer these examples together, unless an earlier one failed."""
        if self._error is not None:
            return
        try:
            self._answers |= zip(numbers, self._answer(numbers), strict=True)
        except (PacelineError, RuntimeError, AssertionError) as error:
            self._error = " ".join(str(error).split()) or type(error).__name__

    def set_baseline(
        self, number: int, baseline: Baseline | None, reference: Baseline | None = None
    ) -> None:
        """Add the target alone, and the bench's reference, to an answered example."""
        if self._error is None:
            alone = {"baseline": baseline, "reference": reference}
            self._answers[number] = self._answers[number].model_copy(update=alone)

    def row(self) -> ResultRow:
        """The result of the answered examples."""
        examples = [self._answers[number] for number in sorted(self._answers)]
        corpus = self._corpus_figures()
        failed = self._error is not None
        return ResultRow(
            key=self._prompts.key_of(self._decoding),
            context=self._prompts.context,
            decoding=self._decoding,
            metric=self._prompts.task.metric,
            status="failed" if failed else "done",
            error=self._error,
            examples=() if failed else tuple(examples),
            corpus_scores=corpus.scores,
            corpus_intervals=corpus.intervals,
            signatures=self._prompts.task.signatures(),
        )

    def _corpus_figures(self) -> CorpusFigures:
        """Figures of all answers together; none if the cell failed or fails here."""
        if self._error is not None:
            return CorpusFigures({}, {})
        answered = sorted(self._answers.items())
        answers = [self._prompts.text(row.tokens, number) for number, row in answered]
        try:
            return corpus_figures(self._prompts.task, self._prompts.examples, answers)
        except PacelineError as error:
            self._error = " ".join(str(error).split())
            return CorpusFigures({}, {})
