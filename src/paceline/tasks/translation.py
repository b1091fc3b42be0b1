"""Task of translating sentences, scored by sacrebleu: BLEU and chrF of the whole corpus.

An example is scored by chrF. BLEU is a figure of a corpus: of a sentence it is 0 unless four words
in a row match, or it is mostly its smoothing. A small model with poor translations had a mean of
0.055 over sentences where corpus BLEU / 100 was 0.0045. chrF counts parts of words, so it needs no
smoothing and also tells poor translations apart.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator

from paceline.tasks import scoring
from paceline.tasks.corpus_figures import CorpusCounts, CorpusFigure
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tasks.base import TaskExample


class Translation(RowTask):
    """Sentences with one reference translation each.

    `score` is sentence chrF / 100, which quality floors need. Its mean is not corpus chrF:
    quote the corpus figures.

    Attributes:
        metric: Metric of `score`. Corpus figures have BLEU and chrF.
        tokenize: sacrebleu's tokenizer for BLEU.
        lowercase: BLEU ignores case.
        chrf_word_order: 0: chrF; 2: chrF++.
    """

    version: ClassVar[int] = 3
    task: Literal["translation"] = "translation"
    metric: Literal["chrf"] = "chrf"
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    lowercase: bool = False
    chrf_word_order: int = Field(default=0, ge=0)

    @field_validator("metric", mode="before")
    @classmethod
    def _is_of_a_sentence(cls, metric: Any) -> Any:
        scoring.refuse_sentence_bleu(metric)
        return metric

    def score(self, example: TaskExample, answer: str) -> float:
        """Sentence chrF, 0 to 1.

        Raises:
            UsageError: sacrebleu is not installed.
        """
        return scoring.sentence_chrf(example.reference, self.cut(answer), self.chrf_word_order)

    def corpus_counts(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, CorpusFigure]:
        """Counts of corpus BLEU and chrF, 0 to 100.

        Raises:
            UsageError: sacrebleu is not installed.
        """
        cut = [self.cut(answer) for answer in answers]
        references = [[example.reference for example in examples]]
        return {name: _counts(self._metric(name), cut, references) for name in ("bleu", "chrf")}

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

    def _metric(self, name: str) -> Any:
        if name == "chrf":
            return scoring.chrf_metric(self.chrf_word_order)
        return _bleu(self.tokenize, self.lowercase)


def _counts(metric: Any, answers: list[str], references: list[list[str]]) -> CorpusCounts:
    """What `corpus_score` sums; sacrebleu's public interface has these counts for BLEU alone."""
    counts = metric._extract_corpus_statistics(answers, references)
    return CorpusCounts(
        torch.tensor(counts, dtype=torch.float64),
        lambda sums: float(metric._compute_score_from_stats(sums).score),
        100.0,
    )


@cache
def _bleu(tokenize: str, lowercase: bool) -> Any:
    return scoring.sacrebleu_metrics().BLEU(tokenize=tokenize, lowercase=lowercase)
