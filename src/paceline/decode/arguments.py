"""Checks of the arguments of decoders: one line that says what came and what is wanted."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import PromptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def whole(name: str, value: Any, least: int | None = 1, advice: str = "") -> int:
    """The value as an integer; `least`: None allows any. `advice` is added to its message.

    Raises:
        UsageError: it is not a whole number, or too small.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of several values
        raise UsageError(f"{name} must be a whole number, got {reprlib.repr(value)}") from None
    if least is not None and number < least:
        raise UsageError(f"{name} must be {least} or more, got {number}{advice}")
    return number


def real(name: str, value: Any, low: float, high: float | None = None) -> float:
    """The value, in [low, high]; raises UsageError."""
    if not low <= value <= (value if high is None else high):
        wanted = f"{low:g} or more" if high is None else f"in [{low:g}, {high:g}]"
        raise UsageError(f"{name} must be {wanted}, got {reprlib.repr(value)}")
    return value


def token_lists(prompts: Any) -> list[list[int]]:
    """The prompts as lists of token ids; raises PromptError."""
    try:
        return [[operator.index(token) for token in prompt] for prompt in listed(prompts)]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of several values
        raise PromptError(
            "every prompt must be a text, a chat or a list of token ids, got "
            f"{reprlib.repr(prompts)}; give one of these per prompt"
        ) from None


def listed(prompts: Any) -> list[Any]:
    """Several prompts as a list.

    Raises:
        PromptError: a single one, such as a message or what a tokenizer returns.
    """
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__iter__"):
        raise PromptError(
            "prompts must be a list of texts, chats or lists of token ids, got "
            f"{reprlib.repr(cast('object', prompts))}; put a single prompt into a list, or pass "
            "input_ids of a tokenizer's result, encoded without padding"
        )
    return list(prompts)


def one_of(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """The value, if it is one of these; raises UsageError."""
    if value in choices:
        return value
    wanted = " or ".join(map(repr, choices))
    raise UsageError(f"{name} must be {wanted}, got {reprlib.repr(value)}")


def check_models(**models: Any) -> None:
    """Raise UsageError if a model is not loaded, such as a path; names are the keywords."""
    for name, model in models.items():
        if not hasattr(model, "start_session"):
            raise UsageError(
                f"the {name} must be a loaded model, got {reprlib.repr(model)}; use load_model, or "
                "wrap_model for a model of transformers"
            )


def seeds_of(seed: Any, count: int) -> Sequence[int]:
    """One seed per prompt; raises UsageError."""
    if isinstance(seed, int) or not hasattr(seed, "__iter__"):
        first = whole("seed", seed, None)
        return range(first, first + count)
    seeds = [whole("seed", each, None) for each in seed]
    if len(seeds) != count:
        raise UsageError(f"got {len(seeds)} seeds for {count} prompts; give one each")
    return seeds
