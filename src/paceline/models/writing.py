"""A model that is being trained, as it writes text: from a fresh copy, its matrices in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.models.agreement import ROUNDED, unless_wrong
from paceline.models.causal import CausalModel, HfDecoder
from paceline.models.causal_session import CausalSession
from paceline.models.llama import LlamaDecoder
from paceline.models.native_llama import NativeLlama
from paceline.models.native_weights import can_copy

if TYPE_CHECKING:
    from paceline.models.session import ModelSession


class WritingModel:
    """The same model; its sessions read with the weights as they are when the session starts.

    A few rows' tokens are read in compiled passes over a copy, which lives as long as the session:
    a step's loss needs the memory again. Prompts, and models of which there is no such copy, are
    read as the model itself reads.
    """

    def __init__(self, model: CausalModel) -> None:
        self.vocab_size = model.vocab_size
        self.max_length = model.max_length
        self.eos_token_ids = model.eos_token_ids
        self.num_parameters = model.num_parameters
        self._model = model
        possible = model.device.type == "cpu" and LlamaDecoder.supports(model.hf)
        self._copies = possible and can_copy(model.hf, in_training=True)
        self._checked = False

    def start_session(self) -> ModelSession:
        model = self._model
        if not self._copies:
            return CausalSession(model)
        hf, limit = model.hf, model.draft_vocabulary
        decoder = _Decoder(model, NativeLlama(hf, limit))
        copy = CausalModel(hf, model.tokenizer, decoder, limit)
        if not self._checked:
            self._checked = True
            if unless_wrong(copy, "the compiled copy of a model in training", ROUNDED) is None:
                self._copies = False
                return CausalSession(model)
        return CausalSession(copy)


class _Decoder(HfDecoder):
    """Transformers for many tokens, the copy for few."""

    def __init__(self, model: CausalModel, copy: NativeLlama) -> None:
        super().__init__(model.hf, model.draft_vocabulary)
        self._copy = copy

    def reader_of(self, num_tokens: int) -> NativeLlama | None:
        return self._copy if num_tokens <= self._copy.most_tokens else None
