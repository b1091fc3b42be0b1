"""Loads a target, a draft and prompts, and samples texts from one of the models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol, TypeVar

from pydantic import Field, model_validator

from paceline.config import Options, StrictModel
from paceline.core.sampling import SamplingParams, proposal_params
from paceline.data import CorpusConfig, read_prompts
from paceline.data.collate import batches_of_like_length
from paceline.decode import AutoregressiveDecoder
from paceline.errors import UsageError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import tokenizer_of
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models import HfModel
    from paceline.models.contract import Model

Text = TypeVar("Text")

SampledBy = Annotated[SamplingParams, Options("temperature", "top_p", "top_k")]
DraftedBy = Annotated[SamplingParams | None, Options(draft_temperature="temperature")]


class ModelsConfig(StrictModel):
    """Models, their number formats, and lengths of prompts and texts."""

    target: str
    draft: str
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    draft_weights: Literal["auto", "int8"] = "auto"
    """int8: quantize the draft's weights to 8 bits before measuring."""


class PairConfig(ModelsConfig):
    """Models, prompts and sampling.

    Attributes:
        draft_sampling: Sampling parameters of the draft; None: the same as `sampling`. Most engines
            draft greedily: `{temperature: 0}`.
    """

    prompts: CorpusConfig
    sampling: SampledBy = SamplingParams()
    draft_sampling: DraftedBy = None
    batch_size: int = Field(default=16, ge=1)

    @model_validator(mode="after")
    def _one_penalty(self) -> PairConfig:
        proposal_params(self.sampling, self.draft_sampling)
        return self


class Writing(Protocol):
    """How a model writes texts."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


class Pair(NamedTuple):
    """Both models prepared for decoding."""

    target: HfModel
    draft: HfModel

    @property
    def tokenizer(self):
        """The tokenizer of both models."""
        assert self.target.tokenizer is not None, "load_models checks it"
        return self.target.tokenizer


def load_models(
    config: ModelsConfig, progress: Progress = silent, *, full_vocabulary: bool = False
) -> Pair:
    """Load both models and prepare them for decoding.

    `full_vocabulary`: the draft proposes from the full vocabulary, even if it has a reduced one.

    Raises:
        UsageError: a model or the pair of tokenizers cannot be used.
    """
    progress("loading", 0, 2)
    target = load_model(config.target, dtype=config.dtype, device=config.device)
    tokenizer_of(target, config.target)
    progress("loading", 1, 2)
    draft = load_model(config.draft, dtype=target.dtype, device=config.device)
    check_same_vocabulary(target, draft)
    if full_vocabulary:
        draft = draft.without_draft_vocabulary()
    ready = prepare_for_decoding(draft, config.draft_weights)
    pair = Pair(prepare_for_decoding(target), ready)
    progress("loading", 2, 2)
    return pair


def load_prompts(config: PairConfig, pair: Pair) -> list[list[int]]:
    """Read the prompts as tokens.

    Raises:
        PromptError: there are no prompts, or one is malformed.
    """
    return read_prompts(
        config.prompts,
        pair.tokenizer,
        max_tokens=config.max_prompt_tokens,
        encoder=pair.target.decoder_prompt is not None,
    )


def after_skipped(texts: list[Text], skip_prompts: int, path: str) -> list[Text]:
    """The texts after the first `skip_prompts`.

    Raises:
        UsageError: none is left; the message names `path`.
    """
    if skip_prompts >= len(texts):
        raise UsageError(
            f"{path} has {len(texts):,} prompts and skip_prompts is {skip_prompts:,}; lower it"
        )
    return texts[skip_prompts:]


def sample_texts(
    writer: Model,
    prompts: Sequence[Sequence[int]],
    config: Writing,
    completions: list[list[int]],
    progress: Progress = silent,
    *,
    skipped: int = 0,
) -> None:
    """Sample the missing texts from `writer` and append them to `completions`.

    `skipped`: number of texts before the first prompt; each text of a corpus has its own seed.
    """
    decoder = AutoregressiveDecoder(writer, config.sampling)
    decoder.forces_eos = False
    start = len(completions)
    missing = prompts[start:]
    written: dict[int, list[int]] = {}
    progress("sampling text", start, len(prompts))
    for rows in batches_of_like_length(list(map(len, missing)), config.batch_size):
        seeds = [config.seed + skipped + start + row for row in rows]
        batch = [missing[row] for row in rows]
        generations = decoder.generate(batch, config.max_new_tokens, seed=seeds)
        written |= zip(rows, (generation.tokens for generation in generations), strict=True)
        progress("sampling text", start + len(written), len(prompts))
    completions += [written[row] for row in range(len(missing))]
