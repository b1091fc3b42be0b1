"""Task of translating sentences, scored by sacrebleu: BLEU and chrF of the whole corpus."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from paceline.tasks import scoring
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tasks.base import TaskExample


class Translation(RowTask):
    """Sentences with one reference translation each.

    `score` is sacrebleu's sentence-level metric / 100, which intervals and quality floors need. Its
    mean is not corpus BLEU: quote the corpus figures.

    Attributes:
        metric: Sentence metric of `score`. Corpus figures have both.
        tokenize: sacrebleu's tokenizer for BLEU.
        lowercase: BLEU ignores case.
        chrf_word_order: 0: chrF; 2: chrF++.
    """

    task: Literal["translation"] = "translation"
    metric: Literal["bleu", "chrf"] = "bleu"
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    lowercase: bool = False
    chrf_word_order: int = Field(default=0, ge=0)

    def score(self, example: TaskExample, answer: str) -> float:
        """Sentence BLEU or chrF, 0 to 1; BLEU has exponential smoothing and effective order.

        Raises:
            UsageError: sacrebleu is not installed.
        """
        found = self._metric(self.metric, sentence=True).sentence_score(
            self.cut(answer), [example.reference]
        )
        # Rounding can put a perfect score slightly above 100.
        return min(1.0, found.score / 100)

    def corpus_scores(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, float]:
        """Corpus BLEU and chrF, 0 to 100.

        Raises:
            UsageError: sacrebleu is not installed.
        """
        cut = [self.cut(answer) for answer in answers]
        references = [[example.reference for example in examples]]
        return {
            name: float(self._metric(name).corpus_score(cut, references).score)
            for name in ("bleu", "chrf")
        }

    def versions(self) -> dict[str, str]:
        """Versions of task and sacrebleu, and fingerprints of the data."""
        return super().versions() | {"sacrebleu": scoring.installed_version("sacrebleu")}

    def signatures(self) -> dict[str, str]:
        """The same, and sacrebleu's signatures of the corpus figures."""
        found = super().signatures()
        for name in ("bleu", "chrf"):
            metric = self._metric(name)
            # A signature has the number of references, which is known once something is scored.
            metric.corpus_score(["a"], [["a"]])
            found[name] = str(metric.get_signature())
        return found

    def _metric(self, name: str, *, sentence: bool = False) -> Any:
        if name == "chrf":
            return _chrf(self.chrf_word_order)
        return _bleu(self.tokenize, self.lowercase, sentence)


@cache
def _bleu(tokenize: str, lowercase: bool, effective_order: bool) -> Any:
    return scoring.sacrebleu_metrics().BLEU(
        tokenize=tokenize, lowercase=lowercase, effective_order=effective_order
    )


@cache
def _chrf(word_order: int) -> Any:
    return scoring.sacrebleu_metrics().CHRF(word_order=word_order)
