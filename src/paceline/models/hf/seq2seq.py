"""Encoder-decoder transformers models: T5, mT5, UMT5, BART, Marian and similar ones.

Prompts are encoder inputs. The decoder's text begins with `decoder_prompt`, which is not part of a
generation.

Shape suffixes: B batch, N new tokens, T text, S source, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers.modeling_outputs import BaseModelOutput

from paceline.core.sampling import limited
from paceline.models.hf.architectures import source_length
from paceline.models.hf.base import HfModel
from paceline.models.hf.cache import cache_argument
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.masks import mask_and_positions
from paceline.models.hf.positions import at_positions
from paceline.models.hf.row_session import RowSession
from paceline.models.hf.seq2seq_session import Seq2SeqSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.core.fused import Head
    from paceline.models.contract import Batch
    from paceline.models.hf.base import ForwardPass, Sessions, StartSession
    from paceline.models.hf.seq2seq_cache import Seq2SeqCache


class Seq2SeqModel(HfModel):
    """An encoder-decoder and its tokenizer."""

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        decoder_prompt: tuple[int, ...],
        draft_vocabulary: Tensor | None = None,
        decoder: ForwardPass | None = None,
        start: StartSession | None = None,
    ) -> None:
        decoder = decoder or Seq2SeqPass(hf, draft_vocabulary)
        super().__init__(hf, tokenizer, draft_vocabulary, decoder, start)
        self.decoder_prompt = decoder_prompt
        self.max_source_length = source_length(hf.config)

    @property
    def session_kinds(self) -> dict[Sessions, StartSession]:
        return {
            "batch": Seq2SeqSession,
            "rows": functools.partial(RowSession, start=Seq2SeqSession),
        }

    @property
    def _again(self) -> Callable[..., Seq2SeqModel]:
        kept = {"tokenizer": self.tokenizer, "decoder_prompt": self.decoder_prompt}
        return functools.partial(Seq2SeqModel, **kept)

    @property
    def _projection(self) -> Head:
        bias_1V = getattr(self.hf, "final_logits_bias", None)
        head = super()._projection
        return head if bias_1V is None else head._replace(bias_V=bias_1V[0])

    def plain_hidden(self, batch: Batch) -> Tensor:
        source = _source_of(batch)
        states_BSD = encode(self.hf, source)
        hidden_BTD = decode(self.hf, batch, states_BSD, source.attention_BT)
        return logit_map(self.hf).scaled(hidden_BTD)

    def plain_logits(self, batch: Batch) -> Tensor:
        source = _source_of(batch)
        return self.hf(
            input_ids=source.tokens_BT,
            attention_mask=source.attention_BT,
            decoder_input_ids=batch.tokens_BT,
            decoder_attention_mask=batch.attention_BT,
            use_cache=False,
        ).logits


@dataclass
class _Encoded(BaseModelOutput):
    """Output of an encoder, with the field that encoders with experts add."""

    router_logits: tuple[Tensor] | None = None


class Seq2SeqPass:
    """The forward pass of transformers; `encode` is its encoder."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        self.hf = hf
        self.draft_vocabulary = draft_vocabulary
        self._cache_argument = cache_argument(hf)

    def encode(self, source: Batch) -> Tensor:
        """The encoder's output, [B, S, D]."""
        return encode(self.hf, source)

    def __call__(
        self, tokens_BN: Tensor, cache: Seq2SeqCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        mask_BW, placed = None, contextlib.nullcontext()
        if ends_B is not None:
            ragged = mask_and_positions(ends_B, tokens_BN)
            mask_BW = ragged["attention_mask"]
            placed = at_positions(_part(self.hf, "decoder"), ragged["position_ids"])
        with placed:
            logits = self.hf(
                encoder_outputs=_Encoded(cache.states_BSD),  # pyright: ignore[reportArgumentType]
                attention_mask=cache.attention_BS,
                decoder_input_ids=tokens_BN,
                decoder_attention_mask=mask_BW,
                **{self._cache_argument: cache},
                use_cache=True,
            ).logits[:, -keep:]
        return logits if self.draft_vocabulary is None else limited(logits, self.draft_vocabulary)

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        decoder: nn.Module = _part(self.hf, "decoder")
        scaled = logit_map(self.hf).scaled
        return decoder.register_forward_hook(
            lambda _module, _inputs, output: listener(scaled(output.last_hidden_state))
        ).remove


def encode(hf: PreTrainedModel, source: Batch) -> Tensor:
    """The encoder's output, [B, S, D]."""
    return _part(hf, "encoder")(
        input_ids=source.tokens_BT, attention_mask=source.attention_BT
    ).last_hidden_state


def decode(
    hf: PreTrainedModel, batch: Batch, states_BSD: Tensor, attention_BS: Tensor | None
) -> Tensor:
    """The decoder's output without a cache, [B, T, D]."""
    return _part(hf, "decoder")(
        input_ids=batch.tokens_BT,
        attention_mask=batch.attention_BT,
        encoder_hidden_states=states_BSD,
        encoder_attention_mask=attention_BS,
        use_cache=False,
    ).last_hidden_state


def _part(hf: PreTrainedModel, name: Literal["encoder", "decoder"]) -> nn.Module:
    part: Any = hf.get_encoder() if name == "encoder" else hf.get_decoder()
    return part


def _source_of(batch: Batch) -> Batch:
    assert batch.source is not None, "a batch of an encoder-decoder has sources"
    return batch.source
