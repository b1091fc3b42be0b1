"""May a draft propose tokens to this target? Only if both mean the same text by the same number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from paceline.models.contract import Model

_ADVICE = "choose or build a draft with the target's own tokenizer"


def check_same_vocabulary(target: Model, draft: Model) -> int:
    """The number of tokens both models name; slice the logits of both to it.

    Embedding tables are often padded to different widths: that is allowed, and sliced off. Which
    tokens are special may differ, too: the roles are the target's, the numbers decide.

    Raises:
        VocabularyMismatchError: One token has two numbers, or one model cannot name a token.
    """
    width = max(target.vocab_size, draft.vocab_size)
    target_ids, draft_ids = _token_ids(target, width), _token_ids(draft, width)
    if target_ids is not None and draft_ids is not None and target_ids != draft_ids:
        raise VocabularyMismatchError(_difference(target_ids, draft_ids))
    # without a tokenizer the logits may be padded, so only a lack of columns is a mismatch
    named = draft.vocab_size if target_ids is None and draft_ids is not None else target.vocab_size
    lacking = target.vocab_size < named or draft.vocab_size < named
    unclear = (target_ids is None) == (draft_ids is None) and target.vocab_size != draft.vocab_size
    if lacking or unclear:
        raise VocabularyMismatchError(
            f"the target gives logits for {target.vocab_size} tokens and the draft for "
            f"{draft.vocab_size}; {_ADVICE}"
        )
    return named


def _token_ids(model: Model, width: int) -> dict[str, int] | None:
    """Without what some tokenizers name beyond the last logit: no model can produce that."""
    if model.tokenizer is None:
        return None
    return {token: id for token, id in model.tokenizer.get_vocab().items() if id < width}


def _difference(target_ids: dict[str, int], draft_ids: dict[str, int]) -> str:
    tokens = target_ids.keys() | draft_ids.keys()
    differing = [token for token in tokens if target_ids.get(token) != draft_ids.get(token)]
    example = min(differing, key=lambda token: (target_ids.get(token, len(tokens)), token))
    return (
        f"the tokenizers of target and draft differ in {len(differing)} of {len(tokens)} entries, "
        f"for example {example!r} is {_number(target_ids, example)} in the target and "
        f"{_number(draft_ids, example)} in the draft; {_ADVICE}"
    )


def _number(ids: dict[str, int], token: str) -> str:
    return f"token {ids[token]}" if token in ids else "missing"
