"""Derives a draft from its target: a subset of layers, smaller widths, or random weights.

Layers can be searched for: those with the highest acceptance as an untrained draft. Small subsets
cannot be compared directly: without training, all have an acceptance near 0. The search therefore
removes layers one by one, each time the one whose removal leaves the highest acceptance. It then
replaces single layers by adjacent ones while the acceptance rises.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field, model_validator

from paceline.config import HomePath, StrictModel
from paceline.core.sampling import SamplingParams
from paceline.data.sources import rows_of, sample_completions
from paceline.data.tokens import read_prompts, read_texts
from paceline.errors import ConfigError, UsageError
from paceline.models.drafts.derive import Embeddings, derive_draft
from paceline.models.drafts.layers import check_layers, layer_lists, subset_layers
from paceline.models.drafts.restricted_head import limit_vocabulary
from paceline.models.drafts.save import other_file
from paceline.models.drafts.subclone import measure_importance, subclone, width_with
from paceline.models.hf.architectures import num_decoder_layers
from paceline.models.hf.text_part import text_model
from paceline.models.loading import tokenizer_of
from paceline.progress import silent
from paceline.rng import named_generator
from paceline.train.evaluation import AgreementEvaluator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.data.input_checks import InputChecks
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress

_SOURCE_TOKENS = 128  # of each source that the target answers, to rank layers and tokens
_ROWS = 16  # texts that the target generates to search layers
_PROMPT = 32  # prompt tokens per text
_NEW = 32  # generated tokens per text


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
    out: HomePath
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
        if self.params is None and self.embeddings != "target":
            raise ValueError(f"embeddings {self.embeddings} needs params; leave embeddings out")
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
        checks.output(self.out)


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
            f"out {out} already contains a model; choose another directory, or give --overwrite "
            "(in Python: overwrite=True)"
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
    hf = text_model(target.hf)
    target = target if hf is target.hf else target.rewrap(hf)
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
        width = width_with(draft, config.widths)
        importance = measure_importance(draft, target, texts, seed=config.seed)
        draft = subclone(draft, width, importance)
    return draft, kept


class KeptLayers(NamedTuple):
    """Indices of the target's layers in a draft, in order; `encoder` None: all, or no encoder."""

    decoder: list[int]
    encoder: list[int] | None = None


def search_layers(
    target: HfModel,
    texts: Sequence[Sequence[int]],
    count: int | None,
    *,
    encoder_count: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> KeptLayers:
    """Find the `count` layers with the highest acceptance.

    The target generates evaluation text from the first tokens of `texts`. With `encoder_count`,
    layers of the encoder are searched next, for a draft with the layers found first.

    Args:
        target: The model.
        texts: Texts of a decoder-only model, or sources of an encoder-decoder.
        count: Layers, of the decoder if there is an encoder; None: all.
        encoder_count: Layers of the encoder; None: all.
        seed: Seed of the target's text.
        progress: Called with the progress of each search.

    Raises:
        UsageError: the target has fewer layers, or all texts are empty.
    """
    lists = layer_lists(target.hf)
    for part, wanted in (("decoder", count), ("encoder", encoder_count)):
        most = len(lists[part][1]) if part in lists else 0
        if wanted is not None and not 1 <= wanted <= most:
            of = "the target's layers" if len(lists) == 1 else f"the target's {part} layers"
            raise UsageError(f"got {wanted} layers to search for; wanted 1 to {most}, {of}")
    evaluator = _evaluator(target, texts, seed)
    decoder = tuple(range(len(lists["decoder"][1])))

    def acceptance(layers: tuple[int, ...], encoder: tuple[int, ...] | None) -> float:
        draft = subset_layers(target, layers, encoder, share=True)
        return evaluator.evaluate(draft)["expected_acceptance"]

    if count is not None:
        of_decoder = cache(lambda layers: acceptance(layers, None))
        decoder = _search(decoder, count, of_decoder, progress)
    if encoder_count is None:
        return KeptLayers(list(decoder))
    whole = tuple(range(len(lists["encoder"][1])))
    of_encoder = cache(lambda layers: acceptance(decoder, layers))
    return KeptLayers(list(decoder), list(_search(whole, encoder_count, of_encoder, progress)))


def _search(
    whole: tuple[int, ...],
    count: int,
    acceptance: Callable[[tuple[int, ...]], float],
    progress: Progress,
) -> tuple[int, ...]:
    chosen = whole
    while len(chosen) > count:
        chosen = max((_without(chosen, layer) for layer in chosen), key=acceptance)
        progress("searching layers", len(whole) - len(chosen), len(whole) - count)
    return climb(chosen, len(whole), acceptance)


def climb(
    chosen: tuple[int, ...], num_layers: int, acceptance: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Replace one layer by an adjacent one while the acceptance rises."""
    while True:
        best = max([chosen, *_neighbours(chosen, num_layers)], key=acceptance)
        if best == chosen:
            return chosen
        chosen = best


def _neighbours(chosen: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    moved = [
        (*_without(chosen, layer), layer + step)
        for layer in chosen
        for step in (-1, 1)
        if 0 <= layer + step < num_layers and layer + step not in chosen
    ]
    return [tuple(sorted(layers)) for layers in moved]


def _without(layers: tuple[int, ...], removed: int) -> tuple[int, ...]:
    return tuple(layer for layer in layers if layer != removed)


def _evaluator(target: HfModel, texts: Sequence[Sequence[int]], seed: int) -> AgreementEvaluator:
    longest = _PROMPT if target.decoder_prompt is None else None  # sources are kept whole
    prompts = [list(text[:longest]) for text in texts if len(text)][:_ROWS]
    if not prompts:
        raise UsageError("got no text to rank layers with; add documents")
    rng = named_generator(seed, "layer search")
    uniforms = torch.rand(len(prompts), _NEW, generator=rng, dtype=torch.float64)
    texts = sample_completions(target, prompts, uniforms)
    rows = rows_of(target, prompts, texts)
    return AgreementEvaluator(target, rows, SamplingParams(), gamma=1, vocab_size=target.vocab_size)
