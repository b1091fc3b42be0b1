"""Wraps transformers models as Paceline models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.admission.model import admit
from paceline.models.hf.architectures import configured_prompt, is_encoder_decoder, refuse_by_name
from paceline.models.hf.causal import CausalModel
from paceline.models.hf.seq2seq import Seq2SeqModel
from paceline.models.hf.settings import refuse_malformed, warn_of_unused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.hf.base import HfModel


def wrap_model(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_vocabulary: Tensor | None = None,
    decoder_prompt: Sequence[int] | None = None,
) -> HfModel:
    """Wrap a transformers model, decoder-only or encoder-decoder, as a Paceline model.

    Args:
        hf_model: The model.
        tokenizer: Its tokenizer, if texts are tokenised.
        draft_vocabulary: The only tokens it may propose, most likely first, [K]; None for all.
        decoder_prompt: Encoder-decoders only: the tokens that every decoder text begins with. None:
            `decoder_start_token_id` and, if it is set, `forced_bos_token_id`.

    Raises:
        UnsupportedModelError: Its sessions do not give the logits of transformers.
        UsageError: `decoder_prompt` is given for a decoder-only model, or it is missing.
    """
    model = unchecked(hf_model, tokenizer, decoder_prompt)
    warn_of_unused(hf_model, stacklevel=2)
    return admitted(model, draft_vocabulary)


def admitted(
    model: HfModel, draft_vocabulary: Tensor | None = None, files: str | None = None
) -> HfModel:
    """A model whose sessions have been compared with transformers; see `admission.model.admit`."""
    admit(model, files)  # before the restriction: it compares the logits of all tokens
    if draft_vocabulary is not None:
        model = model.rewrap(model.hf, draft_vocabulary.to(model.device))
    model.files = files
    return model


def unchecked(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    decoder_prompt: Sequence[int] | None = None,
) -> HfModel:
    """`wrap_model` without comparing anything."""
    refuse_by_name(hf.config)
    if not isinstance(hf.get_output_embeddings(), nn.Module):
        raise UnsupportedModelError(
            f"{type(hf).__name__} has no output head; load it with AutoModelForCausalLM, or "
            "AutoModelForSeq2SeqLM if it is an encoder-decoder"
        )
    refuse_malformed(hf)
    if is_encoder_decoder(hf.config):
        if decoder_prompt is None:
            decoder_prompt = configured_prompt(hf.config, hf.generation_config)
        prompt = tuple(decoder_prompt)
        _check_prompt(hf, prompt)
        return Seq2SeqModel(hf, tokenizer, decoder_prompt=prompt)
    if decoder_prompt is not None:
        raise UsageError(
            f"got decoder_prompt {list(decoder_prompt)}, but {hf.config.model_type} is "
            "decoder-only; begin the prompts themselves with these tokens"
        )
    return CausalModel(hf, tokenizer)


def _check_prompt(hf: PreTrainedModel, prompt: tuple[int, ...]) -> None:
    embeddings: Any = hf.get_input_embeddings()
    count = embeddings.weight.shape[0]
    if not prompt or not 0 <= min(prompt) <= max(prompt) < count:
        raise UsageError(
            f"got decoder_prompt {list(prompt)}; wanted at least one token id below {count}"
        )
