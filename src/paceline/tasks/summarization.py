"""Task of summarizing documents, scored by rouge_score."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from paceline.tasks import scoring
from paceline.tasks.corpus_figures import CorpusFigure, means
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tasks.base import TaskExample

_REPORTED = ("rouge1", "rouge2", "rougeLsum")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Summarization(RowTask):
    """Documents with one reference summary each.

    Attributes:
        metric: ROUGE variant of `score`. Corpus figures have rouge1, rouge2 and rougeLsum. ROUGE-2
            is what the papers report; it is 0 for most summaries of small models, so the default,
            which intervals and quality floors use, is rougeLsum.
        sentences: rougeLsum compares sentence by sentence. `lines`: a sentence is a line, as
            rouge_score defines it; `punctuation`: a sentence also ends after ".", "!" or "?".
        stem: Compare stems of words.
    """

    task: Literal["summarization"] = "summarization"
    metric: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeLsum"
    sentences: Literal["lines", "punctuation"] = "lines"
    stem: bool = True

    def score(self, example: TaskExample, answer: str) -> float:
        """ROUGE F-measure, 0 to 1.

        Raises:
            UsageError: rouge_score is not installed.
        """
        return self._scores((self.metric,), example, answer)[self.metric]

    def corpus_counts(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, CorpusFigure]:
        """Counts of mean F-measures, 0 to 1.

        Raises:
            UsageError: rouge_score is not installed.
        """
        found = [
            self._scores(_REPORTED, example, answer)
            for example, answer in zip(examples, answers, strict=True)
        ]
        return means({name: [scores[name] for scores in found] for name in _REPORTED})

    def versions(self) -> dict[str, str]:
        """Versions of task, rouge_score and its stemmer, and fingerprints of the data."""
        return super().versions() | scoring.metric_versions("rouge1")

    def signatures(self) -> dict[str, str]:
        """The same, and the settings of ROUGE."""
        stem = "yes" if self.stem else "no"
        signature = f"f-measure|mean|stem:{stem}|sentences:{self.sentences}"
        return super().signatures() | {"rouge": signature}

    def _scores(
        self, metrics: tuple[str, ...], example: TaskExample, answer: str
    ) -> dict[str, float]:
        texts = (example.reference.strip(), self.cut(answer))
        reference, answer = texts if self.sentences == "lines" else map(_on_lines, texts)
        return scoring.rouge_scores(metrics, reference, answer, stem=self.stem)


def _on_lines(text: str) -> str:
    return _SENTENCE_END.sub("\n", text)
