"""How good an answer is: libraries that others use too, so that numbers can be compared.

Each is an extra and slow to import, so it is imported by the function that needs it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from paceline.errors import UsageError
from paceline.extensions import IMPORT, imported

if TYPE_CHECKING:
    from collections.abc import Iterator

Rouge: TypeAlias = Literal["rouge1", "rouge2", "rougeL"]
BuiltInMetric: TypeAlias = Literal["exact_match", "rouge1", "rouge2", "rougeL", "bleu"]


def _known(metric: Any) -> Any:
    """One of ours, or `package.module:function`, also as {import: package.module:function}."""
    if isinstance(metric, dict) and set(metric) == {IMPORT}:
        metric = metric[IMPORT]
    if isinstance(metric, str) and ":" in metric:
        if not callable(imported(metric)):
            raise ValueError(f"{metric} is no function of (reference, answer)")
    elif metric not in get_args(BuiltInMetric):
        names = ", ".join(get_args(BuiltInMetric))
        raise ValueError(f"wanted one of {names}, or package.module:function")
    return metric


Metric = Annotated[str, BeforeValidator(_known)]
"""How an answer is compared with its reference: a name, or a function that returns 0 to 1."""


def score_text(metric: Metric, reference: str, answer: str) -> float:
    """How near the answer comes to the reference, 0 to 1. White space around them does not count.

    exact_match is 1 or 0. ROUGE is the F-measure on stems; its tokens are letters a-z and digits
    only. bleu is the BLEU of the one sentence, smoothed, and its mean is not a corpus's BLEU.

    Raises:
        UsageError: the library is not installed.
    """
    reference, answer = reference.strip(), answer.strip()
    if ":" in metric:
        return float(imported(metric)(reference, answer))
    match metric:
        case "exact_match":
            return float(answer == reference)
        case "bleu":
            return _sentence_bleu(reference, answer)
        case _:
            return float(_rouge(metric).score(reference, answer)[metric].fmeasure)


def score_sum(reference: str, answer: str) -> float:
    """1 if the answer is the number that the reference is, as reasoning_gym sees it, else 0.

    The library gives a part of the marks to an answer that contains the number; here that is wrong.

    Raises:
        UsageError: the library is not installed.
    """
    judge = reasoning_gym().get_score_answer_fn("chain_sum")
    return float(judge(answer, {"answer": reference}) == 1.0)


def metric_versions(metric: Metric) -> dict[str, str]:
    """Versions of the libraries that compute the metric.

    Raises:
        UsageError: a library is not installed.
    """
    if metric in get_args(Rouge):
        return {name: installed_version(name) for name in ("rouge-score", "nltk")}
    return {"sacrebleu": installed_version("sacrebleu")} if metric == "bleu" else {}


def installed_version(library: str) -> str:
    """The version of a library of the extra.

    Raises:
        UsageError: it is not installed.
    """
    with _extra(library):
        return importlib.metadata.version(library)


def reasoning_gym() -> Any:
    """The module of that name.

    Raises:
        UsageError: it is not installed.

    Cost: two seconds, once.
    """
    with _extra("reasoning-gym"), warnings.catch_warnings():
        # Python's, of the source of cellpylib, where it is compiled only now.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


@cache
def _rouge(metric: str) -> Any:
    with _extra("rouge-score"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer([metric], use_stemmer=True)


def _sentence_bleu(reference: str, answer: str) -> float:
    with _extra("sacrebleu"):
        import sacrebleu
    # A perfect one is a little above 100 in binary.
    return min(1.0, sacrebleu.sentence_bleu(answer, [reference]).score / 100)


@contextlib.contextmanager
def _extra(library: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{library} cannot be imported ({reason}); install it with pip install -e '.[tasks]'"
        ) from None
