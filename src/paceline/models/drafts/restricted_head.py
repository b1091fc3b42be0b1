"""A draft that proposes only likely tokens: most of its head is never read, and that is most of its time."""

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

# A count in the text weighs this much beside the target's own expectation of it.
_COUNTED = 0.3
# Tokens of a text that are read.
_LONGEST = 128


def limit_vocabulary(
    draft: CausalModel, target: CausalModel, texts: Iterable[Sequence[int]], size: int
) -> CausalModel:
    """The same draft, proposing only the tokens that the target expects most often in such texts.

    Tokens that end a text are always among them. Weights are shared with the draft.

    Raises:
        UsageError: The size is not between 1 and the vocabulary's, or there is no text.
    """
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
    """The `size` tokens that the target expects most often in such text, likeliest first, [K].

    Ranked by the target's probability, averaged over the positions of some of the texts, and by how
    often a token stands in all of them: the one knows what the target likes to write, the other
    has seen more text. Tokens that end a text are always among them.

    Args:
        target: Whose text the draft will be asked to foresee.
        texts: Tokens of one text each.
        size: How many tokens the draft may propose.
        num_tokens: Positions to average over.
        seed: Which texts these are from.

    Raises:
        UsageError: The size is not between 1 and the vocabulary's, or there is no text.
    """
    vocab_size = target.vocab_size
    always = [token for token in target.eos_token_ids if token < vocab_size]
    if not max(1, len(always)) <= size <= vocab_size:
        raise UsageError(
            f"a draft vocabulary of {size} tokens was asked for; wanted at least "
            f"{max(1, len(always))} and at most the model's {vocab_size}"
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
    score_V = mass_V / num_read + _COUNTED * counts_V / counts_V.sum()
    score_V[always] = torch.inf
    return score_V.argsort(descending=True, stable=True)[:size]


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token stands in the texts, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts_V += torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
    return counts_V
