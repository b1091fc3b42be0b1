"""Restricts a draft to likely tokens, because its head takes most of its time."""

# V vocabulary, K tokens of the draft vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.models.hf.causal import wrap_model
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.models.hf.causal import CausalModel

_COUNT_WEIGHT = 0.3  # weight of the frequency in the texts, relative to the target's probability
_LONGEST = 128  # tokens processed per text


def limit_vocabulary(
    draft: CausalModel, target: CausalModel, texts: Iterable[Sequence[int]], size: int
) -> CausalModel:
    """Restrict a draft to `likeliest_tokens` (same errors); shares the draft's weights."""
    return wrap_model(draft.hf, draft.tokenizer, likeliest_tokens(target, texts, size))


@torch.inference_mode()
def likeliest_tokens(
    target: CausalModel,
    texts: Iterable[Sequence[int]],
    size: int,
    *,
    num_tokens: int = 4096,
    seed: int = 0,
) -> Tensor:
    """The `size` tokens that the target generates most often, most likely first, [K].

    Tokens are ranked by the target's mean probability over `num_tokens` positions, of texts chosen
    with `seed`, plus their weighted frequency in all texts. Stop tokens are always included.

    Raises:
        UsageError: The size is not between 1 and the vocabulary's, or there is no text.
    """
    vocab_size = target.vocab_size
    always = [token for token in target.eos_token_ids if token < vocab_size]
    if not max(1, len(always)) <= size <= vocab_size:
        raise UsageError(
            f"got a draft vocabulary of {size} tokens; wanted at least {max(1, len(always))} and "
            f"at most the model's {vocab_size}"
        )
    known = [list(text) for text in texts if len(text)]
    if not known:
        raise UsageError("got no text to choose a draft vocabulary by; give some documents")
    counts_V = count_tokens(known, vocab_size).double()
    order = torch.randperm(len(known), generator=named_generator(seed, "draft vocabulary"))
    mass_V = torch.zeros(vocab_size, dtype=torch.float64)
    longest = min(_LONGEST, target.max_length or _LONGEST)
    num_read = 0
    for index in order.tolist():
        tokens = torch.tensor(known[index][:longest], device=target.device)
        logits = target.hf(input_ids=tokens[None], use_cache=False).logits[0, :, :vocab_size]
        mass_V += logits.float().softmax(-1).sum(0).double().cpu()
        num_read += len(tokens)
        if num_read >= num_tokens:
            break
    score_V = mass_V / num_read + _COUNT_WEIGHT * counts_V / counts_V.sum()
    score_V[always] = torch.inf
    return score_V.argsort(descending=True, stable=True)[:size]


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Count each token in the texts, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts_V += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
    return counts_V
