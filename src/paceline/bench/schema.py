"""Result rows: what a cell of the grid did with every example, so that any figure can be resampled.

A reader needs nothing else: reports and plots are made from these rows alone. `schema_version` goes up
when a field changes its meaning.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from paceline.config import StrictModel, describe, fields_of
from paceline.decode.strategies import DecodingConfig, Oracle, Speculative
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams

SCHEMA_VERSION = 2


class Baseline(StrictModel):
    """The target alone on the same prompt, decoded in the same round of cells."""

    seconds: float
    first_seconds: float
    num_tokens: int


class ExampleRow(StrictModel):
    """One answer.

    Attributes:
        score: In [0, 1]; None where the task has no metric.
        seconds: Of the whole request; `first_seconds` of these until the first token.
        baseline: None where the target alone was not timed beside it.
        num_target_calls: Target passes after the one over the prompt.
        num_first_tokens: Tokens that came at `first_seconds`: one, or those of the first block.
        num_prefill_tokens: Of these, those that the pass over the prompt gave: 1, or 0 where the first
            block judges the first token too.
        num_examined: Drafted tokens that were judged; `num_rejected` of these did not stay.
    """

    tokens: tuple[int, ...]
    score: float | None
    seconds: float
    first_seconds: float
    baseline: Baseline | None
    num_target_calls: int
    num_drafted: int
    num_examined: int
    num_rejected: int
    num_first_tokens: int
    num_prefill_tokens: int


class ResultRow(StrictModel):
    """One way of decoding at one temperature.

    Attributes:
        key: Digest of all that the row depends on; a cell with a row of its key is finished.
        context: Digest of what all cells of a bench share: models, task, examples, seed.
        error: One line that says why the cell failed; then there are no examples.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    key: str
    context: str
    decoding: DecodingConfig
    metric: str | None
    status: Literal["done", "failed"]
    error: str | None = None
    examples: tuple[ExampleRow, ...] = ()


def digest(*parts: Any) -> str:
    """Sixteen hexadecimal digits that stand for these JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_row(values: dict[str, Any], where: str) -> ResultRow:
    """A row from JSON.

    Raises:
        UsageError: it is of another version, or something else altogether.
    """
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} has schema_version {version}, this Paceline reads {SCHEMA_VERSION}; run the "
            "bench anew, or read it with the version that wrote it"
        )
    try:
        return ResultRow.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where} is not a result row: {describe(error)}") from None


def family(decoding: DecodingConfig) -> str:
    """The curve of a frontier plot that a cell lies on: all but the swept threshold."""
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
    return " ".join(names)


def setting(decoding: DecodingConfig) -> str:
    """Where on its curve a cell lies, such as `alpha 0.2, gamma 4`."""
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
    """The parameter that is swept: the first that is a number."""
    return next((key for key, value in parameters_of(rule).items() if _is_number(value)), None)


def parameters_of(variant: Any) -> dict[str, Any]:
    """Everything that was chosen of a rule, a policy or a strategy, in order, but for its tag."""
    chosen = {key: getattr(variant, key) for key in fields_of(type(variant))}
    return {
        key: value for key, value in chosen.items() if key not in ("rule", "policy", "strategy")
    }


def _details(rule: Rule) -> list[str]:
    """The rule's name, and all of its parameters but the swept one."""
    rest = {key: v for key, v in parameters_of(rule).items() if key != threshold_of(rule)}
    return [
        rule.name,
        *(str(v) if key == "kind" else f"{_words(key)} {v}" for key, v in rest.items()),
    ]


def _numbers(variant: Any, *names: str) -> list[str]:
    """Its numbers, or these of them, by name; those that are as they are by default are left out."""
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
    """How a draft draws, such as `drafts at T=0.6 top-p 0.9`."""
    told = [f"drafts at T={draft.temperature:g}"]
    if draft.top_k:
        told.append(f"top-k {draft.top_k}")
    if draft.top_p < 1:
        told.append(f"top-p {draft.top_p:g}")
    return " ".join(told)
