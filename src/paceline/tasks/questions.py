"""Task of closed questions with short answers, scored by exact match and F1 as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import PromptError
from paceline.tasks.corpus_figures import CorpusFigure, means
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.tasks.base import TaskExample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Questions(RowTask):
    r"""Questions with one or more accepted answers; the best match counts.

    The column of the reference holds a text or a list of texts. A passage to read comes from the
    template: `prompt: "{context}\n\nQuestion: {source}\nAnswer:"`.

    Attributes:
        metric: Metric of `score`. Corpus figures have both.
        prompt: Template of a prompt.
    """

    task: Literal["questions"] = "questions"
    metric: Literal["exact_match", "f1"] = "f1"
    prompt: str = "Question: {source}\nAnswer:"

    def score(self, example: TaskExample, answer: str) -> float:
        """The best exact match or F1 over the accepted answers, 0 to 1."""
        return self._best(exact_match if self.metric == "exact_match" else f1, example, answer)

    def corpus_counts(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, CorpusFigure]:
        """Counts of mean exact match and F1, 0 to 100, as SQuAD's script reports them."""
        both = list(zip(examples, answers, strict=True))
        scores = {
            name: [self._best(metric, *each) for each in both]
            for name, metric in (("exact_match", exact_match), ("f1", f1))
        }
        return means(scores, most=100.0)

    def signatures(self) -> dict[str, str]:
        """Versions and fingerprints, and how answers are compared."""
        return super().signatures() | {"match": "squad:1.1|max over references"}

    def read_references(self, value: Any, name: str, where: str) -> tuple[str, ...]:
        """A text, or a list of them; raises PromptError if there is none."""
        if isinstance(value, list):
            texts = tuple(text for text in value if isinstance(text, str) and text.strip())
            if not texts or len(texts) < len(value):
                raise PromptError(
                    f"{where} has no or an empty reference answer in the list {name}; fill it or "
                    "leave the row out"
                )
            return texts
        return super().read_references(value, name, where)

    def _best(
        self, metric: Callable[[str, str], float], example: TaskExample, answer: str
    ) -> float:
        answer = self.cut(answer)
        return max(metric(text, answer) for text in (example.reference, *example.alternatives))


def normalised(answer: str) -> str:
    """The answer in lower case, without punctuation, articles and surplus white space."""
    bare = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(reference: str, answer: str) -> float:
    """1 if the normalised texts are equal, else 0."""
    return float(normalised(reference) == normalised(answer))


def f1(reference: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the normalised words; 0 if none is shared."""
    wanted, given = (Counter(normalised(text).split()) for text in (reference, answer))
    shared = (wanted & given).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / given.total(), shared / wanted.total()
    return 2 * precision * recall / (precision + recall)
