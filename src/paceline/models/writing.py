"""A model that is being trained, as it writes text: from a fresh copy, its matrices in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.models.agreement import ROUNDED, unless_wrong
from paceline.models.causal import CausalModel, HfDecoder
from paceline.models.causal_session import CausalSession
from paceline.models.llama import LlamaDecoder
from paceline.models.native_llama import NativeLlama
from paceline.models.native_weights import can_copy
from paceline.models.precision import Choice, faster_of, fastest_of, overridden

if TYPE_CHECKING:
    from paceline.models.session import ModelSession


class WritingModel:
    """The same model; its sessions read with the weights as they are when the session starts.

    Attributes:
        has_copies: Whether sessions read copies; if not, they read as the model does.

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
        self.has_copies = possible and can_copy(model.hf, in_training=True)
        self._checked = False

    def start_session(self) -> ModelSession:
        model = self._model
        if not self.has_copies:
            return CausalSession(model)
        hf, limit = model.hf, model.draft_vocabulary
        decoder = _Decoder(model, NativeLlama(hf, limit))
        copy = CausalModel(hf, model.tokenizer, decoder, limit)
        if not self._checked:
            self._checked = True
            if unless_wrong(copy, "the compiled copy of a model in training", ROUNDED) is None:
                self.has_copies = False
                return CausalSession(model)
        return CausalSession(copy)


def choose_writer(model: CausalModel, num_rows: int) -> Choice:
    """Whether copies for writing ("bfloat16") read a token a row faster than the model ("float32").

    Timed on the model itself, unless `PACELINE_PRECISION` says which.
    """
    override = overridden()
    if override is not None:
        return override
    writing = WritingModel(model)
    if not writing.has_copies:
        return Choice("float32", f"there is no compiled pass for this {model.hf.config.model_type}")
    tokens_B1 = torch.zeros(num_rows, 1, dtype=torch.int64)
    sessions = {"float32": model.start_session(), "bfloat16": writing.start_session()}
    for session in sessions.values():
        session.prefill(tokens_B1.tolist())
    seconds = fastest_of(
        {name: partial(session.extend, tokens_B1) for name, session in sessions.items()}
    )
    return faster_of(seconds, f"writing {num_rows} rows")


class _Decoder(HfDecoder):
    """Transformers for many tokens, the copy for few."""

    def __init__(self, model: CausalModel, copy: NativeLlama) -> None:
        super().__init__(model.hf, model.draft_vocabulary)
        self._copy = copy

    def reader_of(self, num_tokens: int) -> NativeLlama | None:
        return self._copy if num_tokens <= self._copy.most_tokens else None
