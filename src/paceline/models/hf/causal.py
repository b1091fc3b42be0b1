"""Decoder-only transformers models: sessions for decoding, hidden states for training.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from paceline.core.sampling import limited
from paceline.models.hf.architectures import body_of
from paceline.models.hf.base import HfModel
from paceline.models.hf.cache import cache_argument
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.masks import mask_and_positions
from paceline.models.hf.positions import at_positions, takes_positions
from paceline.models.hf.row_session import RecurrentRow, RowSession, StatefulRow
from paceline.models.hf.session import CausalSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.contract import Batch
    from paceline.models.hf.base import ForwardPass, Sessions, StartSession
    from paceline.models.hf.cache import RoomyCache


class CausalModel(HfModel):
    """A decoder-only model and its tokenizer."""

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_vocabulary: Tensor | None = None,
        decoder: ForwardPass | None = None,
        start: StartSession | None = None,
    ) -> None:
        """`decoder` and `start` are a forward pass and the sessions that use it: see prepare.py."""
        decoder = decoder or HfDecoder(hf, draft_vocabulary)
        super().__init__(hf, tokenizer, draft_vocabulary, decoder, start)

    @property
    def session_kinds(self) -> dict[Sessions, StartSession]:
        return {
            "batch": CausalSession,
            "rows": functools.partial(RowSession, start=CausalSession),
            "recurrent": functools.partial(RowSession, start=RecurrentRow),
            "stateful": functools.partial(RowSession, start=StatefulRow),
        }

    @property
    def _again(self) -> Callable[..., CausalModel]:
        return functools.partial(CausalModel, tokenizer=self.tokenizer)

    def plain_hidden(self, batch: Batch) -> Tensor:
        hidden_BTD = body_of(self.hf)(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_BT, use_cache=False
        ).last_hidden_state
        return logit_map(self.hf).scaled(_for_head(hidden_BTD, self.hf))

    def plain_logits(self, batch: Batch) -> Tensor:
        return self.hf(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_BT, use_cache=False
        ).logits


class HfDecoder:
    """The forward pass of transformers."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        self.hf = hf
        self.draft_vocabulary = draft_vocabulary
        self._takes_positions = takes_positions(hf)
        self._cache_argument = cache_argument(hf)

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        # without padding, most models are faster without mask and positions
        ragged = {} if ends_B is None else mask_and_positions(ends_B, tokens_BN)
        placed = contextlib.nullcontext()
        if ragged and not self._takes_positions:
            decoder: Any = self.hf.get_decoder()
            placed = at_positions(decoder, ragged.pop("position_ids"))
        with placed:
            logits = self.hf(
                input_ids=tokens_BN,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: cache},
                **ragged,
            ).logits[:, -keep:]
        return logits if self.draft_vocabulary is None else limited(logits, self.draft_vocabulary)

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        scaled = logit_map(self.hf).scaled
        return (
            body_of(self.hf)
            .register_forward_hook(
                lambda _module, _inputs, output: listener(
                    scaled(_for_head(output.last_hidden_state, self.hf))
                )
            )
            .remove
        )


def _for_head(hidden: Tensor, hf: Any) -> Tensor:
    """Hidden states in the type of the head, if it has 16 bits; those of Mamba have 32."""
    dtype = hf.get_output_embeddings().weight.dtype
    return hidden.to(dtype) if dtype.itemsize < hidden.dtype.itemsize else hidden
