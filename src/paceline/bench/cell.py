"""One decoding setting that answers the examples one by one, and its result row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paceline.bench.schema import Baseline, ExampleRow, ResultRow
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """A cell that answers example by example, and stops at its first error."""

    def __init__(
        self, prompts: PromptSet, decoding: DecodingConfig, answer: Callable[[int], ExampleRow]
    ) -> None:
        """`answer`: answers the example with this index."""
        self._prompts = prompts
        self._decoding = decoding
        self._answer = answer
        self._examples: list[ExampleRow] = []
        self._error: str | None = None

    @property
    def has_failed(self) -> bool:
        """True after its first error."""
        return self._error is not None

    def answer(self, number: int) -> None:
        """Answer one example, unless an earlier one failed."""
        if self._error is not None:
            return
        try:
            self._examples.append(self._answer(number))
        except (PacelineError, RuntimeError, AssertionError) as error:
            self._error = " ".join(str(error).split()) or type(error).__name__

    def set_baseline(self, baseline: Baseline | None) -> None:
        """Add the target alone to the last answered example."""
        if self._error is None:
            self._examples[-1] = self._examples[-1].model_copy(update={"baseline": baseline})

    def row(self) -> ResultRow:
        """The result of the answered examples."""
        corpus_scores = self._corpus_scores()
        failed = self._error is not None
        return ResultRow(
            key=self._prompts.key_of(self._decoding),
            context=self._prompts.context,
            decoding=self._decoding,
            metric=self._prompts.task.metric,
            status="failed" if failed else "done",
            error=self._error,
            examples=() if failed else tuple(self._examples),
            corpus_scores=corpus_scores,
            signatures=self._prompts.task.signatures(),
        )

    def _corpus_scores(self) -> dict[str, float]:
        """Figures of all answers together; none if the cell failed or fails here."""
        if self._error is not None or self._prompts.task.metric is None:
            return {}
        answers = [self._prompts.text(example.tokens) for example in self._examples]
        try:
            return self._prompts.task.corpus_scores(self._prompts.examples, answers)
        except PacelineError as error:
            self._error = " ".join(str(error).split())
            return {}
