"""Drafts made of their targets: some of the layers, narrower ones, or new ones of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.data.tokens import read_texts
from paceline.errors import ConfigError
from paceline.models.drafts.derive import Embeddings, derive_draft
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.restricted_head import limit_vocabulary
from paceline.models.drafts.subclone import Width, measure_importance, subclone, width_of
from paceline.models.loading import tokenizer_of
from paceline.progress import silent
from paceline.train.layer_search import search_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress


class DraftConfig(StrictModel):
    """What a draft is made of, and where it goes.

    Attributes:
        target: Hub id, directory or GGUF file of the target.
        out: The directory to write the draft to.
        layers: The target's layers to keep, in order.
        search_layers: So many of them, the best by measured acceptance.
        hidden_size: With the next three: sizes of a narrower draft, cut out of the target's weights
            where they matter most; None: the target's own.
        params: A new draft of random weights with at most this part of the target's parameters.
        num_layers: Its depth; None: an eighth of the target's.
        embeddings: Whether it begins with the target's embeddings and head or with random ones.
        vocabulary: Tokens that the draft may propose, the likeliest in the text; None: all.
        text: Text to rank tokens, layers and channels by.
        overwrite: Replace a model that is at `out`; never the target.
        seed: Of everything random.
    """

    target: str = Field(min_length=1)
    out: Path
    layers: tuple[int, ...] | None = None
    search_layers: int | None = Field(default=None, ge=1)
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
        """Is the draft narrower than its target?"""
        return any(
            size is not None
            for size in (
                self.hidden_size,
                self.intermediate_size,
                self.num_heads,
                self.num_key_value_heads,
            )
        )

    @model_validator(mode="after")
    def _says_one_thing(self) -> DraftConfig:
        cut = {"layers": self.layers, "search_layers": self.search_layers}
        named = [name for name, value in cut.items() if value is not None]
        if self.narrows:
            named.append("a width")
        if self.params is not None and named:
            raise ValueError(f"params makes a new draft and {named[0]} cuts one out; drop one")
        if self.layers is not None and self.search_layers is not None:
            raise ValueError("layers says which and search_layers finds them; drop one")
        if self.params is None and not named:
            raise ValueError("give layers, search_layers, a width such as hidden_size, or params")
        if self.params is None and self.num_layers is not None:
            raise ValueError("num_layers is the depth of a new draft; use search_layers, or params")
        needs = {
            "search_layers": self.search_layers is not None,
            "a width": self.narrows,
            "vocabulary": self.vocabulary is not None,
        }
        wanting = [name for name, needed in needs.items() if needed]
        if wanting and self.text is None:
            raise ValueError(f"{wanting[0]} needs text beside it, to rank by")
        if self.text is not None and not wanting:
            raise ValueError(
                "text ranks tokens, layers or channels, and none is asked for; drop it"
            )
        return self


def check_place(config: DraftConfig) -> None:
    """Is there nothing at `out` that somebody would miss?

    Raises:
        ConfigError: there is.
    """
    out = config.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if Path(config.target).resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"out {out} is where the target is; choose another")
    if not (out / "config.json").exists():
        raise ConfigError(f"out {out} is there and holds no model; choose another")
    if not config.overwrite:
        raise ConfigError(f"out {out} holds a model; choose another, or set overwrite=true")


def make_draft(
    config: DraftConfig, target: CausalModel, *, progress: Progress = silent
) -> tuple[CausalModel, list[int] | None]:
    """The draft, and which layers of the target it has (None: a new one).

    Raises:
        UsageError: The target is too small for what is asked, or a text cannot be read.
        UnsupportedModelError: The target is not laid out as this needs it.
    """
    texts: Sequence[Sequence[int]] = []
    if config.text is not None:
        texts = list(read_texts(config.text, tokenizer_of(target, config.target)))
    if config.params is not None:
        draft, kept = _new(config, target), None
    else:
        draft, kept = _cut_out(config, target, texts, progress)
    if config.vocabulary is not None:
        draft = limit_vocabulary(draft, target, texts, config.vocabulary)
    return draft, kept


def _new(config: DraftConfig, target: CausalModel) -> CausalModel:
    assert config.params is not None, "a new draft has a size"
    return derive_draft(
        target,
        config.params,
        num_layers=config.num_layers,
        embeddings=config.embeddings,
        seed=config.seed,
    )


def _cut_out(
    config: DraftConfig, target: CausalModel, texts: Sequence[Sequence[int]], progress: Progress
) -> tuple[CausalModel, list[int]]:
    if config.search_layers is not None:
        kept = search_layers(
            target, texts, config.search_layers, seed=config.seed, progress=progress
        )
    elif config.layers is not None:
        kept = list(config.layers)
    else:
        kept = list(range(target.hf.config.num_hidden_layers))
    draft = subset_layers(target, kept)
    if config.narrows:
        old = width_of(draft)
        sizes = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_key_value_heads,
        )
        chosen = (size or own for size, own in zip(sizes, old, strict=True))
        draft = subclone(draft, Width(*chosen), measure_importance(draft, texts))
    return draft, kept
