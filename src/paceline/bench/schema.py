"""Result rows: the answers of a cell to every example, with times and counts.

Reports need only these rows.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from paceline.config import StrictModel, describe, fields_of
from paceline.decode.strategies import DecodingConfig, Oracle, Speculative
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams

TARGET_ALONE = "autoregressive"  # names of families
ORACLE = "oracle_cascade"
TARGET_BONUS = "target bonus"  # last in a family's name


class Baseline(StrictModel):
    """A model alone on the same prompt, timed by turns with the cells."""

    seconds: float
    first_seconds: float
    num_tokens: int


class ExampleRow(StrictModel):
    """One answer.

    Attributes:
        score: In [0, 1]; None if the task has no metric.
        seconds: Of the whole request; `first_seconds`: until the first token. Both are 0 for an
            answer that was made together with others.
        baseline: The target alone; None if it was not timed on this example.
        reference: The same for a third model, if the bench has one.
        num_target_calls: Target passes after the prefill.
        num_first_tokens: Tokens available at `first_seconds`: one, or those of the first block; 0
            for an answer without times.
        num_prefill_tokens: Tokens from the prefill: 1, or 0 if a block gives the first token.
        num_examined: Drafted tokens that were verified; `num_rejected` of them were rejected.
    """

    tokens: tuple[int, ...]
    score: float | None
    seconds: float
    first_seconds: float
    baseline: Baseline | None
    reference: Baseline | None = Field(default=None, exclude_if=lambda value: value is None)
    num_target_calls: int
    num_drafted: int
    num_examined: int
    num_rejected: int
    num_first_tokens: int
    num_prefill_tokens: int

    def as_baseline(self) -> Baseline:
        """The answer as the baseline of others."""
        num_tokens = len(self.tokens)
        return Baseline(
            seconds=self.seconds, first_seconds=self.first_seconds, num_tokens=num_tokens
        )


class ResultRow(StrictModel):
    """Results of one decoding setting.

    Attributes:
        key: Digest of everything the row depends on; identifies finished cells.
        context: Digest of everything the cells of a bench share: models, task, examples, seed.
        error: Why the cell failed, in one line; `examples` is then empty.
        corpus_scores: Figures of all answers together, such as corpus BLEU, if the task has any.
        corpus_intervals: Bounds of their 95% intervals over examples, where the task has them.
        signatures: What scores depend on: versions, data, settings of the metrics; likewise.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str
    context: str
    decoding: DecodingConfig
    metric: str | None
    status: Literal["done", "failed"]
    error: str | None = None
    examples: tuple[ExampleRow, ...] = ()
    corpus_scores: dict[str, float] = Field(default_factory=dict)
    corpus_intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    signatures: dict[str, str] = Field(default_factory=dict)


def digest(*parts: Any) -> str:
    """Digest of JSON values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_row(values: dict[str, Any], where: str) -> ResultRow:
    """Read a row from JSON.

    Raises:
        UsageError: the row has another version or is malformed.
    """
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} has schema_version {version}, this Paceline reads {SCHEMA_VERSION}; run the "
            "bench again, or read the row with the version that wrote it"
        )
    try:
        return ResultRow.model_validate(values, context=Origin.RESULTS)
    except ValidationError as error:
        raise UsageError(f"{where} is not a result row: {describe(error)}") from None


def family(decoding: DecodingConfig) -> str:
    """Name of the cell's curve in a frontier plot: everything but threshold and block length."""
    strategy = decoding.strategy
    if isinstance(strategy, Oracle):
        return " ".join([strategy.strategy, *_details(strategy.rule)])
    if not isinstance(strategy, Speculative):
        normalised = getattr(strategy, "normalise", False)
        return f"{strategy.strategy} normalised" if normalised else strategy.strategy
    names = _details(strategy.rule)
    if strategy.policy.name != "fixed":
        names.append(strategy.policy.name)
    if strategy.draft_sampling is not None:
        names.append(_drawn(strategy.draft_sampling))
    if strategy.bonus == "target":
        names.append(TARGET_BONUS)
    return " ".join(names)


def setting(decoding: DecodingConfig) -> str:
    """Position of the cell on its curve, such as `alpha 0.2, gamma 4`."""
    strategy = decoding.strategy
    if isinstance(strategy, Speculative | Oracle):
        threshold = threshold_of(strategy.rule)
        parts = [] if threshold is None else _numbers(strategy.rule, threshold)
    else:
        parts = _numbers(strategy)
    if isinstance(strategy, Speculative):
        parts.insert(1, f"gamma {strategy.num_speculative_tokens}")
        parts += _numbers(strategy.policy)
    return ", ".join(parts)


def threshold_of(rule: Rule) -> str | None:
    """The swept parameter: the first that is a number."""
    return next((key for key, value in parameters_of(rule).items() if _is_number(value)), None)


def parameters_of(variant: Any) -> dict[str, Any]:
    """Parameters of a rule, a policy or a strategy, in order, without its tag."""
    tags = ("rule", "policy", "strategy")
    return {key: getattr(variant, key) for key in fields_of(type(variant)) if key not in tags}


def _details(rule: Rule) -> list[str]:
    """The rule's name, and its parameters without the swept one."""
    rest = {key: v for key, v in parameters_of(rule).items() if key != threshold_of(rule)}
    parts = (str(v) if key == "kind" else f"{_words(key)} {v}" for key, v in rest.items())
    return [rule.name, *parts]


def _numbers(variant: Any, *names: str) -> list[str]:
    """The named numeric parameters; without names, those that differ from their defaults."""
    fields = fields_of(type(variant))
    return [
        f"{_words(key)} {value:g}"
        for key, value in parameters_of(variant).items()
        if _is_number(value) and (key in names if names else value != fields[key].default)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _drawn(draft: SamplingParams) -> str:
    """Name of the draft's sampling, such as `drafts at T=0.6 top-p 0.9`."""
    parts = [f"drafts at T={draft.temperature:g}"]
    if draft.top_k:
        parts.append(f"top-k {draft.top_k}")
    if draft.top_p < 1:
        parts.append(f"top-p {draft.top_p:g}")
    return " ".join(parts)
