"""A target's hidden states of texts, kept in memory while many drafts are scored on these texts.

The target's own pass is most of the work of scoring. Its head, a small part, runs again each time.
"""

# B batch, T positions, D hidden, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import UnsupportedModelError
from paceline.models.contract import decoder_contexts, decoder_prompt_of, pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models import HfModel

    Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

_MOST_BYTES = 2 * 10**9


class KeptStates:
    """Logits of the target before each token of texts; see `acceptance.ForcedLogits`."""

    def __init__(self, target: HfModel, most_bytes: int = _MOST_BYTES) -> None:
        self.target = target
        self.head = target.head
        self._free = most_bytes
        self._kept: dict[Key, Tensor] = {}

    @classmethod
    def of(cls, target: HfModel) -> KeptStates | None:
        """None if the target's logits are an unknown function of its hidden states."""
        try:
            return cls(target)
        except UnsupportedModelError:
            return None

    def __call__(self, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
        """Shapes: B prompts, tokens [B, T] -> [B, T, V]."""
        key = tuple(map(tuple, prompts)), tuple(tuple(map(int, tokens_T)) for tokens_T in tokens_BT)
        hidden_BTD = self._kept.get(key)
        if hidden_BTD is None:
            hidden_BTD = self._hidden(prompts, tokens_BT)
            size = hidden_BTD.nbytes
            if size <= self._free:
                self._free -= size
                self._kept[key] = hidden_BTD
        return self.head.logits(hidden_BTD)

    def _hidden(self, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
        contexts = decoder_contexts(self.target, prompts)
        rows = [
            [*context, *map(int, tokens_T[:-1])]
            for context, tokens_T in zip(contexts, tokens_BT, strict=True)
        ]
        texts = pad(rows)
        if decoder_prompt_of(self.target) is not None:
            texts = texts._replace(source=pad(prompts).to(self.target.device))
        hidden_BTD = self.target.hidden(texts.to(self.target.device))
        first_B = torch.tensor([len(context) - 1 for context in contexts])
        places_BT = first_B[:, None] + torch.arange(tokens_BT.shape[1])
        index_BT1 = places_BT[..., None].to(hidden_BTD.device)
        return hidden_BTD.gather(1, index_BT1.expand(-1, -1, hidden_BTD.shape[-1]))
