"""Checks that target and draft share a vocabulary: a token id is the same text in both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    ContextLengthError,
    UsageError,
    VocabularyMismatchError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.models.contract import Model

_SHORTEST = 2  # one prompt token and one new token
_ADVICE = "choose or build a draft with the target's own tokenizer"


def written_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tokens that a model writes; Marian may have another vocabulary for its sources."""
    marian: Any = tokenizer
    two = getattr(tokenizer, "separate_vocabs", False)
    return dict(marian.target_encoder) if two else tokenizer.get_vocab()


def check_same_vocabulary(target: Model, draft: Model) -> int:
    """Return the size of the shared vocabulary, to slice the logits of both models to.

    Embedding tables may be padded to different widths, and special tokens may differ: only the
    mapping from tokens to ids has to agree.
    """
    _check_same_kind(target, draft)
    width = max(target.vocab_size, draft.vocab_size)
    if target.tokenizer is not None and draft.tokenizer is not None:
        _check_same_tokens(target.tokenizer, draft.tokenizer, width)
    if target.vocab_size != draft.vocab_size:
        raise VocabularyMismatchError(
            f"the target has logits for {target.vocab_size} tokens and the draft for "
            f"{draft.vocab_size}; {_ADVICE}"
        )
    return target.vocab_size


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: Model) -> int:
    """`check_same_vocabulary` for a target of which only the tokenizer is here.

    Both tokenizers may have tokens beyond the last logit.
    """
    if draft.tokenizer is not None:
        _check_same_tokens(target, draft.tokenizer)
    return draft.vocab_size


def check_block(gamma: int, limit: int | None) -> None:
    """Check that a block of gamma drafted tokens fits a context; raises ContextLengthError."""
    if limit is not None and limit - gamma < _SHORTEST:
        raise ContextLengthError(
            f"a block of gamma {gamma} does not fit the models' context of {limit} tokens; choose "
            f"a gamma of at most {limit - _SHORTEST}"
        )


def check_fits(
    model: Model, num_prompt: int, num_new: int, names: tuple[str, str], who: str
) -> None:
    """Raise a ContextLengthError unless prompts and new tokens of these lengths fit a model.

    `names` are the settings of both lengths and `who` is the model, for the message.
    """
    prompt_name, new_name = names
    start, limit = model.decoder_prompt, model.max_length
    if start is not None:
        source_limit = model.max_source_length
        if source_limit is not None and num_prompt > source_limit:
            raise ContextLengthError(
                f"{prompt_name} is {num_prompt:,}, but {who}'s encoder holds {source_limit:,} "
                "tokens; lower it"
            )
        prompt_name, num_prompt = "the decoder prompt", len(start)
    if limit is not None and num_prompt + num_new > limit:
        raise ContextLengthError(
            f"{prompt_name} + {new_name} is {num_prompt + num_new:,}, but {who}'s context holds "
            f"{limit:,} tokens; lower one of the two"
        )


def _check_same_kind(target: Model, draft: Model) -> None:
    prompts = target.decoder_prompt, draft.decoder_prompt
    if prompts[0] == prompts[1]:
        return
    kinds = ["decoder-only" if prompt is None else "an encoder-decoder" for prompt in prompts]
    if None in prompts:
        raise UsageError(
            f"the target is {kinds[0]} and the draft is {kinds[1]}; choose a draft of the same kind"
        )
    raise UsageError(
        f"the decoder of the target begins with the tokens {list(prompts[0] or ())} and that of "
        f"the draft with {list(prompts[1] or ())}; set the draft's decoder_start_token_id and "
        "forced_bos_token_id to the target's"
    )


def _check_same_tokens(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, width: float = math.inf
) -> None:
    # some tokenizers have tokens beyond the last logit, which no model can produce
    compared = [
        [
            {token: id for token, id in written_vocabulary(tokenizer).items() if id < width}
            for tokenizer in (target, draft)
        ]
    ]
    if getattr(target, "separate_vocabs", False):
        compared.append([target.get_vocab(), draft.get_vocab()])  # of sources
    for target_ids, draft_ids in compared:
        if target_ids != draft_ids:
            raise VocabularyMismatchError(_difference(target_ids, draft_ids))


def _difference(target_ids: dict[str, int], draft_ids: dict[str, int]) -> str:
    tokens = target_ids.keys() | draft_ids.keys()
    differing = [token for token in tokens if target_ids.get(token) != draft_ids.get(token)]
    example = min(differing, key=lambda token: (target_ids.get(token, len(tokens)), token))
    in_target, in_draft = (
        f"token {ids[example]}" if example in ids else "missing" for ids in (target_ids, draft_ids)
    )
    return (
        f"the tokenizers of target and draft differ in {len(differing)} of {len(tokens)} entries, "
        f"for example {example!r} is {in_target} in the target and {in_draft} in the draft; "
        f"{_ADVICE}"
    )
