"""A draft that proposes only likely tokens: most of its head is never read, and that is most of its time.

The model directory stays an ordinary one with the whole head, for engines that know nothing of this;
`draft_vocabulary.json` beside the weights says which tokens the draft may propose. Any draft
distribution leaves the text exactly the target's, so the choice costs acceptance, never exactness.
"""

# V vocabulary, K tokens of the draft vocabulary
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import ModelLoadError, UsageError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.models.causal import CausalModel

# A count in the text weighs this much beside the target's own expectation of it.
_COUNTED = 0.3
# Tokens of a text that are read.
_LONGEST = 128

_FILE = "draft_vocabulary.json"
EXPORTED = "paceline_export.json"
"""Marks an export, and says whether the draft vocabulary is baked into its head."""


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


def spread(logits: Tensor, tokens_K: Tensor, vocab_size: int) -> Tensor:
    """Logits over the draft vocabulary as logits over all tokens; the others get -inf.

    Shapes: [..., K] -> [..., V].
    """
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy_(-1, tokens_K, logits)


def limited(logits: Tensor, tokens_K: Tensor) -> Tensor:
    """Logits over all tokens with -inf outside of the draft vocabulary, [..., V]."""
    return spread(logits[..., tokens_K], tokens_K, logits.shape[-1])


def write_draft_vocabulary(directory: Path, tokens_K: Tensor) -> None:
    """Put it beside the weights."""
    (directory / _FILE).write_text(json.dumps({"tokens": tokens_K.tolist()}), "utf-8")


def read_draft_vocabulary(directory: Path, vocab_size: int) -> Tensor | None:
    """What a model directory says, likeliest first, [K]; None if it says nothing.

    Raises:
        ModelLoadError: The file is damaged or belongs to another model.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        found: Any = json.loads(path.read_text("utf-8"))["tokens"]
        tokens = torch.tensor(found, dtype=torch.int64)
        valid = tokens.ndim == 1 and 0 < len(tokens) == len(tokens.unique())
        valid = valid and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size
    except (ValueError, KeyError, TypeError, RuntimeError):
        valid = False
    if not valid:
        raise ModelLoadError(
            f'{path} is damaged: wanted {{"tokens": [...]}} with different token numbers below '
            f"{vocab_size}; make the draft again, or delete the file to draft from all tokens"
        )
    return tokens  # pyright: ignore[reportPossiblyUnboundVariable]


def is_baked(path: str | Path) -> bool:
    """Is this an export, a directory or a file in one, whose head only finds listed tokens likeliest?"""
    place = Path(path).expanduser()
    marker = (place if place.is_dir() else place.parent) / EXPORTED
    if not marker.exists():
        return False
    try:
        return dict(json.loads(marker.read_text("utf-8"))).get("draft_vocabulary") == "bake"
    except (ValueError, TypeError) as error:
        raise ModelLoadError(
            f"{marker} is damaged ({error}); export the draft again with --overwrite"
        ) from None
