"""Prepared tiny models, and what they read part by part."""

from functools import cache
from typing import Any

import torch

from paceline.models import CausalModel, prepare_for_decoding, wrap_model
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.forward import LlamaDecoder
from tiny import tiny_hf

TEXT = [7, 3, 30, 12, 9, 44, 8, 51, 2, 17, 23, 5]


def prepared(architecture: str = "llama", **overrides: Any) -> CausalModel:
    """With weights that bfloat16 holds, so that there is a compiled pass where there can be one."""
    hf = tiny_hf(architecture, **overrides).bfloat16().float()
    return prepare_for_decoding(wrap_model(hf))


@cache
def prepared_pair(num_draft_layers: int = 2) -> tuple[CausalModel, CausalModel]:
    """A target and a draft for many tests, which leave them as they are."""
    return prepared(seed=0), prepared(seed=0, num_hidden_layers=num_draft_layers)


def reader(model: CausalModel) -> NativeLlama | None:
    """Its compiled pass."""
    assert isinstance(model.decoder, LlamaDecoder)
    return model.decoder.native


def read(model: CausalModel, parts: list[list[int]]) -> torch.Tensor:
    """Logits after every token of one text that is read in these parts, [N, V]."""
    session = model.start_session()
    return torch.cat([session.extend(torch.tensor([part]))[0] for part in parts])
