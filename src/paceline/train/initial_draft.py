"""Derives a draft from its target: a subset of layers, smaller widths, or random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field, model_validator

from paceline.config import HomePath, StrictModel
from paceline.data.sources import sample_completions
from paceline.data.tokens import read_prompts, read_texts
from paceline.errors import ConfigError
from paceline.models.drafts.layers import check_layers, subset_layers
from paceline.models.drafts.restricted_head import likeliest_tokens
from paceline.models.drafts.save import other_file
from paceline.models.drafts.scratch import derive_draft
from paceline.models.drafts.subclone import measure_importance, subclone, width_with
from paceline.models.drafts.transplant import transplant
from paceline.models.hf.architectures import layer_types, num_decoder_layers
from paceline.models.hf.text_part import text_model
from paceline.models.loading import load_model, tokenizer_of
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.data.input_checks import InputChecks
    from paceline.models.hf.base import HfModel

_SOURCE_TOKENS = 128  # of each source that the target answers, to rank tokens
_ANSWERS = 4096  # tokens of all answers
_ANSWER = 128  # tokens of one
_ROWS = 16  # answers sampled together


class DraftConfig(StrictModel):
    """Configuration of a new draft.

    Attributes:
        target: Hub id, directory or GGUF file of the target.
        out: Output directory of the draft.
        layers: Indices of the target's layers to keep, in order; of the decoder if there is an
            encoder. None: all, or the first three, the last and the first of each kind of layers
            that these lack, if neither encoder_layers nor a width nor params is set.
        encoder_layers: Indices of an encoder-decoder's encoder layers to keep; None: all.
        hidden_size: Hidden size of a narrower draft, which keeps the target's most important
            channels; None: the target's.
        donor: A small model of another family, which gets the target's vocabulary and becomes the
            draft; None: the draft is made of the target.
        params: Create a draft with random weights and at most this fraction of the target's
            parameters.
        num_layers: Layers of a draft with random weights; None: an eighth of the target's.
        vocabulary: Number of tokens that the draft may propose, the most likely in the text; None:
            all.
        text: Text for ranking tokens and channels.
        overwrite: Replace a model in `out`, but never the target.
    """

    target: str = Field(min_length=1)
    out: HomePath
    layers: tuple[int, ...] | None = None
    encoder_layers: tuple[int, ...] | None = None
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    donor: str | None = None
    params: float | None = Field(default=None, gt=0, lt=1)
    num_layers: int | None = Field(default=None, ge=1)
    vocabulary: int | None = Field(default=None, ge=1)
    text: str | None = None
    overwrite: bool = False
    seed: int = 0

    @property
    def narrows(self) -> bool:
        """True if any width is set."""
        return any(size is not None for size in self.widths)

    @property
    def widths(self) -> tuple[int | None, ...]:
        """The sizes in the order of `Width`; None: the target's."""
        return self.hidden_size, self.intermediate_size, self.num_heads, self.num_key_value_heads

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        kept = {"layers": self.layers, "encoder_layers": self.encoder_layers}
        named = [name for name, value in kept.items() if value is not None]
        if self.narrows:
            named.append("a width")
        if self.params is not None and named:
            raise ValueError(
                f"got both params (random weights) and {named[0]} (the target's weights); remove "
                "one of them"
            )
        named += ["params"] if self.params is not None else []
        if self.donor is not None and named:
            raise ValueError(f"got both donor and {named[0]}; remove one of them")
        if self.params is None and self.num_layers is not None:
            raise ValueError("num_layers needs params; use layers to keep some of the target's")
        needs = {"a width": self.narrows, "vocabulary": self.vocabulary is not None}
        ranked = [name for name, needed in needs.items() if needed]
        if ranked and self.text is None:
            raise ValueError(f"{ranked[0]} needs text for ranking; set text")
        return self

    def check(self, checks: InputChecks) -> None:
        """Check the inputs, and that the draft may be written to `out`; raises UsageError."""
        check_place(self)
        target = checks.model("target", self.target)
        if self.layers is not None:
            check_layers(self.layers, target.num_layers)
        if self.encoder_layers is not None and target.num_encoder_layers:
            check_layers(self.encoder_layers, target.num_encoder_layers)
        if self.text is not None:
            checks.text("text", self.text, skip_empty=True)
        if self.donor is not None:
            checks.model("donor", self.donor)
        checks.output(self.out)


def check_place(config: DraftConfig) -> None:
    """Check that the draft may be written to `out`."""
    out = config.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    for name, path in (("target", config.target), ("donor", config.donor)):
        if path is not None and Path(path).expanduser().resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"out {out} contains the {name}; choose another directory")
    if not (out / "config.json").exists():
        raise ConfigError(f"out {out} exists and is not a model; choose another directory")
    if not config.overwrite:
        raise ConfigError(
            f"out {out} already contains a model; choose another directory, or give --overwrite "
            "(in Python: overwrite=True)"
        )
    if (other := other_file(out)) is not None:
        raise ConfigError(
            f"out {out} holds {other}, which is no part of a draft; move it, or choose another "
            "directory"
        )


def make_draft(config: DraftConfig, target: HfModel) -> HfModel:
    hf = text_model(target.hf)
    target = target if hf is target.hf else target.rewrap(hf)
    texts = _texts(config, target)
    if config.donor is not None:
        donor = load_model(config.donor, dtype=target.dtype, device=str(target.device))
        tokenizer_of(donor, config.donor)
        draft = transplant(donor.rewrap(text_model(donor.hf)), target)
    elif config.params is not None:
        draft = derive_draft(target, config.params, num_layers=config.num_layers, seed=config.seed)
    else:
        draft = _subset(config, target, texts)
    if config.vocabulary is not None:
        sources = None
        if target.decoder_prompt is not None:
            sources, texts = _answered(target, texts, config.seed)
        tokens_K = likeliest_tokens(target, texts, config.vocabulary, sources)
        draft = draft.rewrap(draft.hf, tokens_K.to(draft.device))
    return draft


def _texts(config: DraftConfig, target: HfModel) -> Sequence[Sequence[int]]:
    """Whole texts, or the sources of an encoder-decoder; none if there is nothing to rank."""
    if config.text is None:
        return []
    tokenizer = tokenizer_of(target, config.target)
    if target.decoder_prompt is None:
        return list(read_texts(config.text, tokenizer, eos_token_ids=target.eos_token_ids))
    return read_prompts(config.text, tokenizer, max_tokens=_SOURCE_TOKENS, encoder=True)


def _subset(config: DraftConfig, target: HfModel, texts: Sequence[Sequence[int]]) -> HfModel:
    draft = subset_layers(target, kept_layers(config, target), config.encoder_layers)
    if config.narrows:
        width = width_with(draft, config.widths)
        draft = subclone(draft, width, measure_importance(draft, texts))
    return draft


def kept_layers(config: DraftConfig, target: HfModel) -> Sequence[int]:
    """The target's layers in a draft that keeps some; of the decoder if there is an encoder."""
    count = num_decoder_layers(target.hf.config)
    if config.layers is not None:
        return config.layers
    if config.narrows or config.encoder_layers is not None:
        return range(count)
    kept = {*range(min(3, count - 1)), count - 1}
    kinds: Sequence[str] = layer_types(target.hf.config) or ()
    missing = set(kinds) - {kinds[layer] for layer in kept if kinds}
    return sorted(kept | {kinds.index(kind) for kind in missing})


def _answered(
    target: HfModel, sources: Sequence[Sequence[int]], seed: int
) -> tuple[list[Sequence[int]], list[list[int]]]:
    """Sources of an encoder-decoder in random order, and answers that it samples to them."""
    rng = named_generator(seed, "answers")
    order = torch.randperm(len(sources), generator=rng).tolist()
    num_new = min(_ANSWER, (target.max_length or _ANSWER) - len(target.decoder_prompt or ()))
    asked: list[Sequence[int]] = []
    answers: list[list[int]] = []
    while len(asked) < len(order) and sum(map(len, answers)) < _ANSWERS:
        part = order[len(asked) : len(asked) + _ROWS]
        prompts = [sources[index][: target.max_source_length] for index in part]
        seeds = torch.randint(2**31, (len(part),), generator=rng).tolist()
        asked += prompts
        answers += sample_completions(target, prompts, seeds, num_new)
    return asked, answers
