"""The part of a model of images or audio and text that reads text, such as that of Gemma 3.

A pass over text does not read the towers of the others, so no draft has them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from paceline.errors import UnsupportedModelError
from paceline.models.hf.architectures import is_encoder_decoder, is_quantized
from paceline.models.hf.spreading import is_spread

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def text_part(hf: PreTrainedModel) -> nn.Module | None:
    """The module that reads text; None: the whole model does."""
    config = hf.config.get_text_config(decoder=True)
    if is_encoder_decoder(hf.config) or config is hf.config:
        return None
    return next((m for m in hf.modules() if type(getattr(m, "config", None)) is type(config)), None)


def num_text_parameters(hf: PreTrainedModel) -> int:
    """Distinct weights that a pass over text may read."""
    part = text_part(hf)
    if part is None:
        return hf.num_parameters()
    head: Any = hf.get_output_embeddings()
    weights = (weight for module in (part, head) for weight in module.parameters())
    return sum({id(weight): weight.numel() for weight in weights}.values())


def text_model(hf: PreTrainedModel) -> PreTrainedModel:
    """The language model that is in a model of images or audio and text, with its weights.

    The model itself, if it reads text alone, is quantized or is spread over several devices.
    """
    part: Any = text_part(hf)
    if part is None or part is hf or is_quantized(hf.config) or is_spread(hf):
        return hf
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(part.config), None)
    if kind is None and type(hf.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return hf
    if kind is None:
        raise UnsupportedModelError(
            f"the language model in a {hf.config.model_type} has no class of its own in "
            "transformers, so no draft is made of its layers; name a draft that has its tokenizer"
        )
    head: Any = hf.get_output_embeddings()
    config: Any = copy.deepcopy(part.config)
    config.tie_word_embeddings = head.weight is part.get_input_embeddings().weight
    with torch.device("meta"):
        new: Any = kind(config)
    setattr(new, new.base_model_prefix, part)
    new.set_output_embeddings(head)
    new.generation_config = hf.generation_config
    return new.train(hf.training)
