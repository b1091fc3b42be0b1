"""Restricts a draft to likely tokens, because its head takes most of its time."""

# V vocabulary, K tokens of the draft vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.models.contract import Texts
from paceline.models.hf.plain_text import plain_text_logits
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.models.hf.base import HfModel

_COUNT_WEIGHT = 0.3  # weight of the frequency in the texts, relative to the target's probability
_LONGEST = 128  # tokens processed per text


@torch.inference_mode()
def likeliest_tokens(
    target: HfModel,
    texts: Iterable[Sequence[int]],
    size: int,
    sources: Sequence[Sequence[int]] | None = None,
    *,
    num_tokens: int = 4096,
) -> Tensor:
    """The `size` tokens that the target generates most often, most likely first, [K].

    Tokens are ranked by the target's mean probability over `num_tokens` positions of drawn texts,
    plus their weighted frequency in all texts. Stop tokens are always included.

    `sources`: Of an encoder-decoder, the source of each text, none of which is empty.

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
    rng = named_generator(0, "draft vocabulary")
    order = torch.randperm(len(known), generator=rng)
    mass_V = torch.zeros(vocab_size, dtype=torch.float64)
    longest = min(_LONGEST, target.max_length or _LONGEST)
    num_read = 0
    for index in order.tolist():
        if sources is None:
            batch = Texts(torch.tensor([known[index][:longest]], device=target.device))
            logits = target.plain_logits(batch)[0]
        else:
            logits = plain_text_logits(target, [sources[index]], [known[index]])[0]
        mass_V += logits[:, :vocab_size].float().softmax(-1).sum(0).double().cpu()
        num_read += len(logits)
        if num_read >= num_tokens:
            break
    counts_V = count_tokens(known, vocab_size).double()
    score_V = mass_V / num_read + _COUNT_WEIGHT * counts_V / counts_V.sum()
    score_V[always] = torch.inf
    return score_V.argsort(descending=True, stable=True)[:size]


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Count each token in the texts, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts_V += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
    return counts_V
