"""Any decoder-only transformers model as a Paceline model: sessions to decode, hidden states to train.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import ModelLoadError, UnsupportedModelError, UsageError
from paceline.models import agreement
from paceline.models.architectures import context_length, prove_rollback, refuse_by_name
from paceline.models.causal_session import CausalSession, evaluating
from paceline.models.draft_vocabulary import limited
from paceline.models.fixed_session import FixedSession
from paceline.models.fixed_shapes import FixedReaders, can_record
from paceline.models.int8 import rounded_copy
from paceline.models.kernels import (
    EXACT,
    ROUNDED,
    Packer,
    bfloat16_product,
    can_pack,
    merged_product,
    packed_copy,
)
from paceline.models.llama import LlamaDecoder
from paceline.models.native_weights import can_copy
from paceline.models.precision import choose_precision, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.cache import RoomyCache
    from paceline.models.native_llama import NativeLlama
    from paceline.models.session import ModelSession


class Decoder(Protocol):
    """A forward pass over new tokens."""

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all); -inf outside of the draft vocabulary."""
        ...

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        """Hear of every pass's hidden states after the final norm, [B, N, D]; call it to stop."""
        ...

    def reader_of(self, num_tokens: int) -> NativeLlama | None:
        """What reads so few tokens in one call, if there is such a thing."""
        ...


class CausalModel:
    """A decoder-only model and its tokenizer.

    Attributes:
        hf: The transformers model.
        tokenizer: Its tokenizer, or None for a wrapped model without one.
        vocab_size: Tokens the tokenizer can name; logit columns beyond are padding and never leave.
        max_length: Longest text, None if the architecture sets no limit.
        eos_token_ids: Tokens that end a text.
        num_parameters: Distinct weights; tied ones count once.
        decoder: What sessions read with; `prepare_for_decoding` gives a faster one.
        draft_vocabulary: The tokens that sessions give a chance, likeliest first, [K]; None for all.
            It bounds what a draft proposes, and where the model is like a Llama it makes the head that much smaller.
        weight_change: Largest change of a weight by that, relative to the largest of its matrix.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        decoder: Decoder | None = None,
        draft_vocabulary: Tensor | None = None,
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.draft_vocabulary = draft_vocabulary
        self.decoder = decoder or HfDecoder(hf, draft_vocabulary)
        self.vocab_size = named_tokens(tokenizer, self._head.weight.shape[0])
        self.max_length = context_length(hf.config)
        self.eos_token_ids = _eos_token_ids(hf, tokenizer)
        self.weight_change = 0.0
        self._readers: FixedReaders | None = None
        self.num_parameters = sum(weight.numel() for weight in hf.parameters())

    def without_draft_vocabulary(self) -> CausalModel:
        """The same model proposing all tokens, as engines have it, which do not read its list."""
        if self.draft_vocabulary is None:
            return self
        return CausalModel(self.hf, self.tokenizer)

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def head_weight(self) -> Tensor:
        """Output projection, [V, D], padding rows included: logits = body @ head_weight^T + head_bias.

        Raises:
            UnsupportedModelError: The model scales or caps its logits after the projection.
            ModelLoadError: Its logits are no numbers.
        """
        if not self._logits_are_projected:
            raise UnsupportedModelError(
                f"{self.hf.config.model_type} scales or caps its logits after the output projection, so "
                "it can decode but not be trained or scored by hidden states; choose another model"
            )
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self._head, "bias", None)

    @functools.cached_property
    def _logits_are_projected(self) -> bool:
        tokens = torch.ones(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode(), evaluating(self.hf):
            wanted = self.hf(input_ids=tokens, use_cache=False).logits.float()
            got = F.linear(self.body(tokens), self._head.weight, self.head_bias).float()
        if not bool(wanted.isfinite().all()):
            raise ModelLoadError(
                f"this {self.hf.config.model_type} gives logits that are NaN or infinite, so its "
                "weights are damaged; copy or make it again"
            )
        return float((wanted - got).abs().max()) <= 0.01 * float(wanted.abs().max())

    @property
    def _head(self) -> nn.Linear:
        head: Any = self.hf.get_output_embeddings()
        return head

    def body(self, tokens_BT: Tensor, attention_mask_BT: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D]; pad on the right. Differentiable."""
        return self.hf.base_model(
            input_ids=tokens_BT, attention_mask=attention_mask_BT, use_cache=False
        ).last_hidden_state

    def start_session(self) -> ModelSession:
        decoder = self.decoder
        if self._readers is None or (isinstance(decoder, LlamaDecoder) and decoder.listening):
            return CausalSession(self)
        return FixedSession(self._readers, self.device, self.vocab_size, self.max_length)

    def prepare_for_decoding(
        self,
        weights: Literal["auto", "plain", "packed_fp16", "int8"] = "auto",
        activations: Literal["float32", "bfloat16"] = "float32",
    ) -> CausalModel:
        """The same model, reading few tokens at a time as fast as this processor can.

        On an x86 CPU the matrices of a float32 model are copied into float16 (see kernels.py), and
        those that bfloat16 holds, of whatever model, once more for a compiled pass over few tokens
        (see native_llama.py). Everything else is float32 then. On a CUDA device a Llama-like model is read
        in passes of fixed shapes, recorded and replayed as graphs (see fixed_shapes.py).
        Later changes of the weights do not reach the copy; `hf`, `body` and the head stay as they are.

        Args:
            activations: "bfloat16" rounds what comes into the products of a bfloat16 model, as
                transformers does with everything; on a processor that multiplies tiles of it, many
                rows are read up to half faster. Nothing changes elsewhere.
            weights: "auto" packs what float16 holds exactly, that is, matrices from a 16-bit
                checkpoint; "packed_fp16" rounds the others, too; "plain" changes nothing. "int8"
                rounds all linear layers to 8 bits a weight, in `hf`, too: for drafts.

        Raises:
            UsageError: "packed_fp16" or "int8" where that is impossible.
        """
        if weights == "int8":
            return self._in_int8()
        on_cpu = self.device.type == "cpu"
        if weights == "packed_fp16" and not (on_cpu and self.dtype == torch.float32 and can_pack()):
            raise UsageError(
                "packed_fp16 weights need float32 on an x86 CPU, but the model is "
                f"{str(self.dtype).removeprefix('torch.')} on {self.device}; use weights=auto"
            )
        if weights == "plain":
            return self
        if self.device.type == "cuda":
            return self.in_fixed_shapes()
        if not on_cpu:
            return self
        if self.dtype == torch.bfloat16:
            return self._in_bfloat16(rounds=activations == "bfloat16")
        if self.dtype != torch.float32 or not can_pack():
            return self
        packer = Packer(EXACT if weights == "auto" else ROUNDED)
        if LlamaDecoder.supports(self.hf):
            decoder: Decoder = LlamaDecoder(self.hf, packer, self.draft_vocabulary)
        else:
            decoder = HfDecoder(packed_copy(self.hf, packer), self.draft_vocabulary)
        if not packer.num_packed:
            return self
        prepared = CausalModel(self.hf, self.tokenizer, decoder, self.draft_vocabulary)
        prepared.weight_change = packer.largest_change
        tolerance = agreement.EXACT if weights == "auto" else agreement.ROUNDED
        return agreement.unless_wrong(prepared, "reading packed weights", tolerance) or self

    def in_fixed_shapes(self) -> CausalModel:
        """The same model, a Llama-like one in passes that a GPU replays: see fixed_shapes.py.

        Weights that are multiplied together lie together then, in `hf`, too. Other models stay as they are.
        """
        if not LlamaDecoder.supports(self.hf) or not can_record(self.hf.config):
            return self
        decoder = LlamaDecoder(self.hf, merged_product, self.draft_vocabulary, compiled=False)
        prepared = CausalModel(self.hf, self.tokenizer, decoder, self.draft_vocabulary)
        prepared._readers = FixedReaders(decoder)
        tolerance = agreement.tolerance_for(self.dtype)
        if agreement.unless_wrong(prepared, "reading recorded passes", tolerance) is None:
            return self
        prepared._readers = FixedReaders(decoder)  # without the recordings of the trial
        return prepared

    def _in_bfloat16(self, *, rounds: bool) -> CausalModel:
        """Few tokens in one compiled pass; many with the products that are fastest here."""
        if not LlamaDecoder.supports(self.hf):
            return self
        chosen = choose_precision("decoding", shapes_of(self.hf.config), self.device)
        if chosen.precision == "bfloat16":
            make_linear, change = bfloat16_product, 0.05
        elif can_pack():
            make_linear, change = Packer(EXACT), 0.05 if rounds else 1e-3
        else:
            return self
        decoder = LlamaDecoder(
            self.hf, make_linear, self.draft_vocabulary, change=change, rounds=rounds
        )
        prepared = CausalModel(self.hf, self.tokenizer, decoder, self.draft_vocabulary)
        return agreement.unless_wrong(prepared, "reading fused layers", agreement.ROUNDED) or self

    def _in_int8(self) -> CausalModel:
        if can_read_int8(self):
            rounded = rounded_copy(self.hf)
            decoder = LlamaDecoder(rounded, Packer(EXACT), self.draft_vocabulary, int8_of=self.hf)
            if decoder.native is not None:
                prepared = CausalModel(rounded, self.tokenizer, decoder, self.draft_vocabulary)
                prepared.num_parameters = self.num_parameters  # a tied head was untied to round it
                name, tolerance = "reading 8-bit weights", agreement.ROUNDED
                if agreement.unless_wrong(prepared, name, tolerance) is not None:
                    return prepared
        raise UsageError(
            f"int8 weights need a Llama-like model on an x86 CPU and a C compiler, but "
            f"this is a {self.hf.config.model_type} in {str(self.dtype).removeprefix('torch.')} on "
            f"{self.device}; use weights=auto"
        )


def can_read_int8(model: CausalModel) -> bool:
    """May such a model be prepared with weights="int8", here?"""
    possible = model.device.type == "cpu" and can_pack()
    return possible and LlamaDecoder.supports(model.hf) and can_copy(model.hf, int8=True)


class HfDecoder:
    """The forward pass of transformers, given only what the batch needs."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        self.hf = hf
        self.draft_vocabulary = draft_vocabulary

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        # without holes neither mask nor positions are needed, and most models are faster without
        ragged = {} if ends_B is None else _mask_and_positions(ends_B, tokens_BN)
        logits = self.hf(
            input_ids=tokens_BN,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            **ragged,
        ).logits
        return logits if self.draft_vocabulary is None else limited(logits, self.draft_vocabulary)

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        return self.hf.base_model.register_forward_hook(
            lambda _module, _inputs, output: listener(output.last_hidden_state)
        ).remove

    def reader_of(self, num_tokens: int) -> NativeLlama | None:
        return None


def _mask_and_positions(ends_B: Tensor, tokens_BN: Tensor) -> dict[str, Tensor]:
    """Which columns hold a token of their row, and the position of each new token in its row."""
    count, device = tokens_BN.shape[1], tokens_BN.device
    width = int(ends_B.max())
    mask_BW = torch.arange(width) >= (width - ends_B)[:, None]
    positions_BN = (ends_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }


def wrap_model(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_vocabulary: Tensor | None = None,
) -> CausalModel:
    """A transformers model that you already hold, as a Paceline model.

    `draft_vocabulary` holds the only tokens that it may propose, likeliest first, [K]; None for all.

    Raises:
        UnsupportedModelError: The architecture cannot roll back.
    """
    refuse_by_name(hf_model.config)
    if not isinstance(hf_model.get_output_embeddings(), nn.Module):
        raise UnsupportedModelError(
            f"{type(hf_model).__name__} has no output head; load it with AutoModelForCausalLM"
        )
    if draft_vocabulary is not None:
        draft_vocabulary = draft_vocabulary.to(hf_model.device)
    prove_rollback(CausalModel(hf_model, tokenizer))  # of all logits, whatever is proposed
    return CausalModel(hf_model, tokenizer, draft_vocabulary=draft_vocabulary)


def named_tokens(tokenizer: PreTrainedTokenizerBase | None, width: int) -> int:
    """Tokens that can be told apart: logits beyond are padding."""
    if tokenizer is None:
        return width
    return min(width, max(tokenizer.get_vocab().values()) + 1)


def _eos_token_ids(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """From the generation settings, else the config, else the tokenizer."""
    text_config = hf.config.get_text_config(decoder=True)
    for source in (hf.generation_config, hf.config, text_config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()


@contextlib.contextmanager
def recorded_hidden_states(model: CausalModel) -> Iterator[list[Tensor]]:
    """What sessions of this model see after the final norm, a tensor [B, N, D] a pass."""
    recorded: list[Tensor] = []
    stop = model.decoder.listen(recorded.append)
    try:
        yield recorded
    finally:
        stop()
