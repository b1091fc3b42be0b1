"""Derives a draft from its target: a subset of layers, smaller widths, or random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.data.input_checks import InputChecks
from paceline.data.tokens import read_prompts, read_texts
from paceline.errors import ConfigError
from paceline.models.drafts.derive import Embeddings, derive_draft
from paceline.models.drafts.layers import check_layers, subset_layers
from paceline.models.drafts.restricted_head import limit_vocabulary
from paceline.models.drafts.save import other_file
from paceline.models.drafts.subclone import Width, measure_importance, subclone, width_of
from paceline.models.drafts.subclone_t5 import (
    T5Width,
    can_subclone,
    measure_t5_importance,
    subclone_t5,
    t5_width_of,
)
from paceline.models.hf.architectures import num_decoder_layers
from paceline.models.loading import tokenizer_of
from paceline.progress import silent
from paceline.train.layer_search import KeptLayers, search_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress


_SOURCE_TOKENS = 128  # of each source that the target answers, to rank layers and tokens


class DraftConfig(StrictModel):
    """Configuration of a new draft.

    Attributes:
        target: Hub id, directory or GGUF file of the target.
        out: Output directory of the draft.
        layers: Indices of the target's layers to keep, in order; of the decoder if there is an
            encoder.
        encoder_layers: Indices of an encoder-decoder's encoder layers to keep; None: all.
        search_layers: Keep the N layers with the best measured acceptance.
        search_encoder_layers: As search_layers, for the encoder.
        hidden_size: Hidden size of a narrower draft, which keeps the target's most important
            channels; None: the target's.
        params: Create a draft with random weights and at most this fraction of the target's
            parameters.
        num_layers: Layers of a draft with random weights; None: an eighth of the target's.
        embeddings: Embeddings and head of a draft with random weights: the target's, or random.
        vocabulary: Number of tokens that the draft may propose, the most likely in the text; None:
            all.
        text: Text for ranking tokens, layers and channels.
        overwrite: Replace a model in `out`, but never the target.
    """

    target: str = Field(min_length=1)
    out: Path
    layers: tuple[int, ...] | None = None
    search_layers: int | None = Field(default=None, ge=1)
    encoder_layers: tuple[int, ...] | None = None
    search_encoder_layers: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    params: float | None = Field(default=None, gt=0, lt=1)
    num_layers: int | None = Field(default=None, ge=1)
    embeddings: Embeddings = "target"
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
        cut = {
            "layers": self.layers,
            "search_layers": self.search_layers,
            "encoder_layers": self.encoder_layers,
            "search_encoder_layers": self.search_encoder_layers,
        }
        named = [name for name, value in cut.items() if value is not None]
        if self.narrows:
            named.append("a width")
        if self.params is not None and named:
            raise ValueError(
                f"got both params (random weights) and {named[0]} (the target's weights); remove "
                "one of them"
            )
        for part in ("", "encoder_"):
            names = f"{part}layers", f"search_{part}layers"
            if all(cut[name] is not None for name in names):
                raise ValueError(f"got both {names[0]} and {names[1]}; remove one of them")
        if self.params is None and not named:
            raise ValueError("give layers, search_layers, a width such as hidden_size, or params")
        if self.params is None and self.num_layers is not None:
            raise ValueError("num_layers needs params; use search_layers to keep N layers")
        needs = {
            "search_layers": self.search_layers is not None,
            "search_encoder_layers": self.search_encoder_layers is not None,
            "a width": self.narrows,
            "vocabulary": self.vocabulary is not None,
        }
        ranked = [name for name, needed in needs.items() if needed]
        if ranked and self.text is None:
            raise ValueError(f"{ranked[0]} needs text for ranking; set text")
        if self.text is not None and not ranked:
            raise ValueError(
                "text is set, but is only used with search_layers, a width or vocabulary; unset it"
            )
        return self

    def check(self) -> InputChecks:
        """Check the inputs, and that the draft may be written to `out`; raises UsageError."""
        check_place(self)
        checks = InputChecks()
        target = checks.model("target", self.target)
        if self.layers is not None:
            check_layers(self.layers, target.num_layers)
        if self.encoder_layers is not None and target.num_encoder_layers:
            check_layers(self.encoder_layers, target.num_encoder_layers)
        if self.text is not None:
            checks.text("text", self.text)
        checks.output(self.out)
        return checks


def check_place(config: DraftConfig) -> None:
    """Check that the draft may be written to `out`.

    Raises:
        ConfigError: writing would delete other files or the target.
    """
    out = config.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if Path(config.target).resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"out {out} contains the target; choose another directory")
    if not (out / "config.json").exists():
        raise ConfigError(f"out {out} exists and is not a model; choose another directory")
    if not config.overwrite:
        raise ConfigError(
            f"out {out} already contains a model; choose another directory, or set overwrite=true"
        )
    if (other := other_file(out)) is not None:
        raise ConfigError(
            f"out {out} holds {other}, which is no part of a draft; move it, or choose another "
            "directory"
        )


def make_draft(
    config: DraftConfig, target: HfModel, *, progress: Progress = silent
) -> tuple[HfModel, KeptLayers | None]:
    """Create the draft. -> the draft, and the target's layers in it (None: random weights).

    Raises:
        UsageError: the target is too small for the configuration, or the text is not readable.
        UnsupportedModelError: the target's architecture is not supported.
    """
    texts = _texts(config, target)
    if config.params is not None:
        kept = None
        draft = derive_draft(
            target,
            config.params,
            num_layers=config.num_layers,
            embeddings=config.embeddings,
            seed=config.seed,
        )
    else:
        draft, kept = _subset(config, target, texts, progress)
    if config.vocabulary is not None:
        draft = limit_vocabulary(draft, target, texts, config.vocabulary)
    return draft, kept


def _texts(config: DraftConfig, target: HfModel) -> Sequence[Sequence[int]]:
    """Whole texts, or the sources of an encoder-decoder; none if there is nothing to rank."""
    if config.text is None:
        return []
    tokenizer = tokenizer_of(target, config.target)
    if target.decoder_prompt is None:
        return list(read_texts(config.text, tokenizer, eos_token_ids=target.eos_token_ids))
    return read_prompts(config.text, tokenizer, max_tokens=_SOURCE_TOKENS, encoder=True)


def _subset(
    config: DraftConfig, target: HfModel, texts: Sequence[Sequence[int]], progress: Progress
) -> tuple[HfModel, KeptLayers]:
    kept = KeptLayers(list(range(num_decoder_layers(target.hf.config))))
    if config.search_layers is not None or config.search_encoder_layers is not None:
        counts = {"count": config.search_layers, "encoder_count": config.search_encoder_layers}
        kept = search_layers(target, texts, **counts, seed=config.seed, progress=progress)
    if config.layers is not None:
        kept = kept._replace(decoder=list(config.layers))
    if config.encoder_layers is not None:
        kept = kept._replace(encoder=list(config.encoder_layers))
    draft = subset_layers(target, *kept)
    if config.narrows:
        draft = _narrowed(config, draft, target, texts)
    return draft, kept


def _narrowed(
    config: DraftConfig, draft: HfModel, target: HfModel, texts: Sequence[Sequence[int]]
) -> HfModel:
    if not can_subclone(draft):
        old = width_of(draft)
        sizes = (size or own for size, own in zip(config.widths, old, strict=True))
        return subclone(draft, Width(*sizes), measure_importance(draft, texts))
    if config.num_key_value_heads is not None:
        raise ConfigError(
            f"{draft.hf.config.model_type} has no key heads of its own; set num_heads and leave "
            "num_key_value_heads out"
        )
    sizes = (size or own for size, own in zip(config.widths, t5_width_of(draft), strict=False))
    importance = measure_t5_importance(draft, target, texts, seed=config.seed)
    return subclone_t5(draft, T5Width(*sizes), importance)
