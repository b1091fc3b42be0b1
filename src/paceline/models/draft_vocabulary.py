"""A draft that proposes only frequent tokens: most of its head is never read, and that is most of its time.

The model directory stays an ordinary one with the whole head, for engines that know nothing of this;
`draft_vocabulary.json` beside the weights says which tokens the draft may propose. Any draft
distribution leaves the text exactly the target's, so the choice costs acceptance, never exactness.
"""

# V vocabulary, K tokens of the draft vocabulary
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import ModelLoadError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_FILE = "draft_vocabulary.json"


def frequent_tokens(
    texts: Iterable[Sequence[int]], size: int, vocab_size: int, *, always: Sequence[int] = ()
) -> Tensor:
    """The `size` most frequent tokens of the texts, increasing, [K]; `always` are among them.

    Equal counts are decided by the smaller number, which in most tokenizers is the commoner token.

    Raises:
        UsageError: The size is not between 1 and the vocabulary's.
    """
    if not max(1, len(set(always))) <= size <= vocab_size:
        raise UsageError(
            f"a draft vocabulary of {size} tokens was asked for; wanted at least "
            f"{max(1, len(set(always)))} and at most the model's {vocab_size}"
        )
    counts_V = count_tokens(texts, vocab_size)
    counts_V[list(always)] = torch.iinfo(counts_V.dtype).max
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values


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


def write_draft_vocabulary(directory: Path, tokens_K: Tensor) -> None:
    """Put it beside the weights."""
    (directory / _FILE).write_text(json.dumps({"tokens": tokens_K.tolist()}), "utf-8")


def read_draft_vocabulary(directory: Path, vocab_size: int) -> Tensor | None:
    """What a model directory says; None if it says nothing, [K] otherwise.

    Raises:
        ModelLoadError: The file is damaged or belongs to another model.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        found: Any = json.loads(path.read_text("utf-8"))["tokens"]
        tokens = torch.tensor(found, dtype=torch.int64)
        valid = tokens.ndim == 1 and len(tokens) > 0 and bool((tokens.diff() > 0).all())
        valid = valid and int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
    except (ValueError, KeyError, TypeError, RuntimeError):
        valid = False
    if not valid:
        raise ModelLoadError(
            f'{path} is damaged: wanted {{"tokens": [...]}} with increasing token numbers below '
            f"{vocab_size}; make the draft again, or delete the file to draft from all tokens"
        )
    return tokens  # pyright: ignore[reportPossiblyUnboundVariable]
