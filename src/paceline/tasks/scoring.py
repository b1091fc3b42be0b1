"""Scores answers with standard metric libraries, so that results are comparable with others.

The libraries are optional and slow to import, so the functions that need them import them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import warnings
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import torch
from pydantic import BeforeValidator, ValidationInfo

from paceline.core.bootstrap import Interval
from paceline.core.bounded_means import bounded_mean_interval
from paceline.environment import how_to_install
from paceline.errors import UsageError
from paceline.extensions import IMPORT, imported, is_permitted
from paceline.permissions import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_RESAMPLES = 1000
Rouge: TypeAlias = Literal["rouge1", "rouge2", "rougeL"]
BuiltInMetric: TypeAlias = Literal["exact_match", "rouge1", "rouge2", "rougeL", "chrf"]


def _known(metric: Any, info: ValidationInfo) -> Any:
    """Validate a built-in name, `package.module:function`, or {import: package.module:function}."""
    if isinstance(metric, dict) and set(metric) == {IMPORT}:
        metric = metric[IMPORT]
    if isinstance(metric, str) and ":" in metric:
        if info.context is Origin.RESULTS and not is_permitted(metric.partition(":")[0]):
            return metric
        found = imported(metric)
        if not callable(found):
            raise ValueError(f"{metric} is not callable; wanted a function of (reference, answer)")
        if not is_permitted(str(getattr(found, "__module__", ""))):
            raise ValueError(
                f"{metric} is a function of another module, {found.__module__}; write one that "
                "takes (reference, answer)"
            )
    elif metric not in get_args(BuiltInMetric):
        names = ", ".join(get_args(BuiltInMetric))
        raise ValueError(f"wanted one of {names}, or package.module:function")
    return metric


Metric = Annotated[str, BeforeValidator(_known)]
"""A built-in metric, or `package.module:function` of (reference, answer) that returns 0 to 1."""


def score_text(metric: Metric, reference: str, answer: str) -> float:
    """Score an answer against its reference, 0 to 1, ignoring surrounding white space.

    exact_match is 1 or 0. ROUGE is the F-measure on stems; its tokens contain only letters a-z and
    digits. chrf is sentence chrF; its mean over examples is not corpus chrF.
    """
    reference, answer = reference.strip(), answer.strip()
    if ":" in metric:
        return float(imported(metric)(reference, answer))
    match metric:
        case "exact_match":
            return float(answer == reference)
        case "chrf":
            found = _chrf().sentence_score(answer, [reference])
            # Rounding can put a perfect score slightly above 100.
            return min(1.0, found.score / 100)
        case _:
            return rouge_scores((metric,), reference, answer)[metric]


def rouge_scores(metrics: tuple[str, ...], reference: str, answer: str) -> dict[str, float]:
    """F-measures of rouge_score on stems, 0 to 1, by the metric's name."""
    found = _rouge(metrics).score(reference, answer)
    return {metric: float(found[metric].fmeasure) for metric in metrics}


@cache
def _chrf() -> Any:
    return optional("sacrebleu.metrics").CHRF()


@cache
def _rouge(metrics: tuple[str, ...]) -> Any:
    scorer = optional("rouge_score.rouge_scorer").RougeScorer
    return scorer(list(metrics), use_stemmer=True)


def score_sum(reference: str, answer: str) -> float:
    """1 if reasoning_gym gives the answer full marks, else 0.

    reasoning_gym gives partial marks to an answer that contains the number; they count as 0 here.
    """
    score = optional("reasoning_gym").get_score_answer_fn("chain_sum")
    return float(score(answer, {"answer": reference}) == 1.0)


def metric_versions(metric: Metric) -> dict[str, str]:
    """Versions of the libraries that compute the metric."""
    if metric in get_args(Rouge):
        return {name: installed_version(name) for name in ("rouge-score", "nltk")}
    return {"sacrebleu": installed_version("sacrebleu")} if metric == "chrf" else {}


def installed_version(library: str) -> str:
    """Version of an optional library; raises UsageError if it is not installed."""
    with _extra(library):
        return importlib.metadata.version(library)


def optional(module: str) -> Any:
    """A module of an optional library; raises UsageError if it is not installed."""
    with _extra(module.partition(".")[0].replace("_", "-")), warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from cellpylib, which reasoning_gym needs
        return importlib.import_module(module)


@contextlib.contextmanager
def _extra(library: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{library} cannot be imported ({reason}); {how_to_install('tasks')}"
        ) from None


def corpus_score(metric: Any, answers: Sequence[str], references: Sequence[str]) -> Interval:
    """The figure of one of sacrebleu's metrics, with its own 95% interval by resampling examples.

    The bounds are NaN if all examples give the same figure.
    """
    paired = optional("sacrebleu.significance").PairedTest
    # Of a single system it has the interval. `n_bootstrap` of a metric has it, too, but fails where
    # only some resamples have a figure of 0.
    test = paired([("", answers)], {"": metric}, [references], "bs", n_samples=_RESAMPLES)
    found: Any
    *_, (found,) = test()[1].values()
    value, middle, half = float(found.score), float(found.mean), float(found.ci)
    if not half:
        return Interval(value, math.nan, math.nan)
    return Interval(value, max(0.0, middle - half), min(100.0, middle + half))


def mean_score(scores: Sequence[float], most: float = 1.0) -> Interval:
    """Mean of scores in [0, 1] with its 95% interval; `most` is the figure of a mean of 1."""
    found = bounded_mean_interval(torch.tensor(scores, dtype=torch.float64))
    return Interval(*(most * one for one in found))
