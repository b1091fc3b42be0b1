"""Loads a target, a draft and prompts, and samples texts from one of the models."""

from __future__ import annotations

import json
import math
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from pydantic import Field, model_validator

from paceline.config import Options, StrictModel
from paceline.core.sampling import SamplingParams, proposal_params
from paceline.data import CorpusConfig, read_records
from paceline.data.collate import batches_of_like_length
from paceline.data.input_checks import note
from paceline.data.prompts import ChatOrRaw
from paceline.data.sources import sample_completions
from paceline.data.tokens import asked, encode_prompt, encode_prompts, truncated
from paceline.decode.decoder import least_of
from paceline.decode.ngram import NGRAM, NgramDraft
from paceline.errors import ConfigError, ContextLengthError, UsageError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import tokenizer_of
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, is_run
from paceline.tasks import Code
from paceline.tasks.base import examples_of
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.data.input_checks import InputChecks
    from paceline.data.prompts import Record
    from paceline.models import HfModel
    from paceline.models.contract import Model, Tokenizer
    from paceline.models.inspection import ModelFacts
    from paceline.results.row import Label
    from paceline.tasks import Task
    from paceline.tasks.base import TaskExample


AnyPair = TypeVar("AnyPair", bound="PairConfig")
SampledBy = Annotated[SamplingParams, Options("temperature", "top_p", "top_k")]
DraftedBy = Annotated[SamplingParams | None, Options(draft_temperature="temperature")]


class ModelsConfig(StrictModel):
    """Models, their number formats, and lengths of prompts and texts."""

    target: str
    draft: str
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=64, ge=1)
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    draft_weights: Annotated[Literal["auto", "int8"], Options()] = "auto"
    """int8: quantize the draft's weights to 8 bits before measuring."""
    parallel: bool = True
    """Let a draft with a mask token (`pard_token`) propose a block in one pass; false: token by
    token, as an ordinary draft."""


def _option(name: str, value: object) -> str:
    """A sampling parameter as an option of a command."""
    if name == "repetition_penalty":
        return f"--set sampling.repetition_penalty={value}"
    return f"--{name.replace('_', '-')} {value}"


class PairConfig(ModelsConfig):
    """Models, prompts and sampling.

    Attributes:
        chat: Ask texts as messages of the user, by the chat template; false: as they are; unset:
            prompts are messages if the target has a template, and documents are continued. Rows
            with messages always use the template.
        draft_sampling: Sampling parameters of the draft, without top_k and top_p unless they are
            set here; None: the same as `sampling`. Most engines draft greedily: `{temperature: 0}`.
    """

    prompts: CorpusConfig
    chat: ChatOrRaw = None
    sampling: SampledBy = SamplingParams()
    draft_sampling: DraftedBy = None
    batch_size: int = Field(default=16, ge=1)
    num_prompts: Annotated[int, Options()] = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _one_penalty(self) -> PairConfig:
        proposal_params(self.sampling, self.draft_sampling)
        return self

    @property
    def setting(self) -> dict[str, Label]:
        """The draft and the sampling parameters as settings of result rows."""
        setting: dict[str, Label] = {"draft": self.draft, **self.sampling.setting}
        if self.draft_sampling is not None:
            setting["draft_temperature"] = self.draft_sampling.temperature
        return setting

    @property
    def scoring(self) -> tuple[SamplingParams, SamplingParams | None, int]:
        """The sampling parameters of both models and the maximum length, as in `PairTexts`."""
        return self.sampling, self.draft_sampling, self.max_new_tokens

    def read_prompts(
        self, tokenizer: Tokenizer, *, encoder: bool = False
    ) -> tuple[Self, list[list[int]]]:
        """Read the first `num_prompts` prompts as tokens; later ones are not read.

        `encoder`: the target is an encoder-decoder.

        Returns:
            This configuration with `chat` as it is for these prompts, None if the template is for
            some of them, and the prompts.
        """
        records = self._records(tokenizer)
        limit = self.max_prompt_tokens
        prompts = encode_prompts(records, tokenizer, max_tokens=limit, encoder=encoder)
        return self._decided(records), prompts

    def _records(self, tokenizer: Tokenizer) -> list[Record]:
        return asked(read_records(self.prompts.first(self.num_prompts)), tokenizer, self.chat)

    def _decided(self, records: Sequence[Record]) -> Self:
        chats = {record.kind == "chat" for record in records}
        return self.model_copy(update={"chat": chats.pop() if len(chats) == 1 else None})

    @property
    def prompt_words(self) -> str:
        """How the prompts are asked, of the configuration of a result."""
        words = {True: "chat template", False: "raw prompts", None: "chats and raw prompts"}
        return words[self.chat]

    @property
    def as_options(self) -> str:
        """Models and prompts as options of a command, of the configuration of a result."""
        given = ["--target", self.target, "--draft", self.draft, "--prompts", self.prompts.path]
        given += {True: ["--chat"], False: ["--raw"], None: []}[self.chat]
        read = self.prompts.model_dump(mode="json", exclude={"path"}, exclude_defaults=True)
        for name, value in read.items():
            given += ["--set", f"prompts.{name}={json.dumps(value, ensure_ascii=False)}"]
        if self.draft_weights != "auto":
            given += ["--draft-weights", self.draft_weights]
        if self.max_prompt_tokens is not None:
            given += ["--set", f"max_prompt_tokens={self.max_prompt_tokens}"]
        named = SamplingParams().model_dump().items() ^ self.sampling.model_dump().items()
        text = shlex.join(map(str, given))
        for name in sorted({name for name, _ in named}):
            text += f" {_option(name, getattr(self.sampling, name))}"
        if (drafts := self.draft_sampling) is not None:
            option = _option("draft_temperature", drafts.temperature)
            if drafts != SamplingParams(temperature=drafts.temperature):
                option = f"--set draft_sampling={shlex.quote(drafts.model_dump_json())}"
            text += f" {option}"
        return text

    def note_defaults(self, checks: InputChecks) -> None:
        """Say if `sampling` is not set, and engines would sample otherwise by default."""
        generation = checks.model("target", self.target).hf.generation_config
        if "sampling" in self.model_fields_set or not getattr(generation, "do_sample", False):
            return
        wanted = {name: getattr(generation, name, None) for name in SamplingParams.model_fields}
        if "engine" in type(self).model_fields:  # not applied there
            del wanted["repetition_penalty"]
        served = {n: x for n, x in wanted.items() if x not in (None, getattr(self.sampling, n))}
        if served:
            listed = ", ".join(f"{name}={value}" for name, value in served.items())
            options = " ".join(_option(name, value) for name, value in served.items())
            note(
                f"texts are sampled at temperature 1, but the generation config of {self.target} "
                f"sets {listed}, which engines use by default; give the settings that you serve "
                f"with, such as {options}"
            )

    def check_prompts(
        self,
        checks: InputChecks,
        models: Iterable[ModelFacts],
        *,
        new_tokens: int,
    ) -> int:
        """Check that the prompts and their `new_tokens` fit the models' context; -> how many."""
        models = list(models)
        encoder = any(model.decoder_prompt is not None for model in models)
        limit = least_of(model.max_length for model in models)
        source_limit = least_of(model.max_source_length for model in models)
        tokenizer = next(m.tokenizer for m in models if m.tokenizer is not None)
        most, lengths, first = self.max_prompt_tokens, list[int](), ""
        records = self._records(tokenizer)
        for record in records:
            tokens = encode_prompt(record, tokenizer)
            if most is not None:
                tokens = truncated(tokens, most, record, tokenizer, encoder=encoder)
            length = len(tokens)
            if source_limit is not None and length > source_limit:
                raise ContextLengthError(
                    f"{record.where} has {length:,} tokens, but the encoder holds "
                    f"{source_limit:,}; set max_prompt_tokens"
                )
            if not encoder:
                _check_room(record.where, length, new_tokens, limit)
            lengths.append(length)
            first = first or str(cast("Any", tokenizer).decode(tokens))
        form, (least, most) = self._decided(records).prompt_words, (min(lengths), max(lengths))
        length = f"{most}" if least == most else f"{least} to {most}"
        fewer = f" (fewer than num_prompts {self.num_prompts})"
        fewer = fewer if len(lengths) < self.num_prompts else ""
        checks.lines += [
            f"prompts: {self.prompts.path}, {len(lengths)} prompts{fewer} of {length} tokens, "
            f"{form}; the first one, as the target reads it, up to the line ---:",
            first,
            "---",
        ]
        return len(lengths)


def check_task(
    checks: InputChecks, name: str, task: Task, count: int, seed: int, counted: str = "num_prompts"
) -> Sequence[TaskExample]:
    """Check the texts of a task, that it has `count` examples, and its scoring library.

    `counted`: the settings that ask for as many, for the message.
    """
    task.versions()
    texts = ("corpus", "train_corpus")
    if isinstance(task, RowTask | Code):  # read columns that other commands do not accept
        texts = ()
    for key in texts:
        if (text := getattr(task, key, None)) is not None:
            checks.text(f"{name}.{key}", text)
    try:
        return examples_of(task, "test", count, seed)
    except UsageError as error:
        count_of = f" ({counted})" if f"{count} were requested" in str(error) else ""
        raise type(error)(f"{error}{count_of}") from None


def show_example(checks: InputChecks, task: Task, example: TaskExample, target: ModelFacts) -> None:
    """Say how the target reads an example of a task."""
    if target.tokenizer is not None:
        records = asked([example.record], target.tokenizer, getattr(task, "chat", False))
        encoder = target.decoder_prompt is not None
        (tokens,) = encode_prompts(records, target.tokenizer, encoder=encoder)
        text = str(cast("Any", target.tokenizer).decode(tokens))
        checks.lines += ["task: the first example, as the target reads it, up to the line ---:"]
        checks.lines += [text, "---"]


def _check_room(where: str, length: int, num_new: int, limit: int | None) -> None:
    if limit is not None and length + num_new > limit:
        # prompts of any length leave no room for as many new tokens as the context holds
        lower = "lower max_new_tokens"
        advice = lower if num_new >= limit else f"set max_prompt_tokens or {lower}"
        raise ContextLengthError(
            f"{where} has {length:,} tokens and needs {num_new:,} more, but the context holds "
            f"{limit:,}; {advice}"
        )


class Writing(Protocol):
    """How a model writes texts, with any sampling parameters."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


class Pair(NamedTuple):
    """A target and a draft."""

    target: HfModel
    draft: HfModel

    @property
    def tokenizer(self):
        assert self.target.tokenizer is not None, "load_models checks it"
        return self.target.tokenizer

    def prompts(self, config: AnyPair) -> tuple[AnyPair, list[list[int]]]:
        """The prompts of a configuration, as its `read_prompts`."""
        encoder = self.target.decoder_prompt is not None
        return config.read_prompts(self.tokenizer, encoder=encoder)


def load_models(
    config: ModelsConfig,
    progress: Progress = silent,
    target: HfModel | None = None,
    *,
    full_vocabulary: bool = False,
) -> Pair:
    """Load both models and prepare them for decoding.

    `target`: the prepared target, if it was loaded before. `full_vocabulary`: the draft proposes
    from the full vocabulary, even if it has a reduced one.
    """
    progress("loading", 0, 2)
    if target is None:
        target = load_model(config.target, dtype=config.dtype, device=config.device)
        tokenizer_of(target, config.target)
    progress("loading", 1, 2)
    if config.draft == NGRAM:
        return Pair(prepare_for_decoding(target), cast("HfModel", NgramDraft(target)))
    draft = load_beside(target, config.draft, config.device, parallel=config.parallel)
    if full_vocabulary:
        draft = draft.without_draft_vocabulary()
    ready = prepare_for_decoding(draft, config.draft_weights)
    pair = Pair(prepare_for_decoding(target), ready)
    progress("loading", 2, 2)
    return pair


def trained_acceptance(draft: str) -> float:
    """Acceptance on held-out text at the end of the run that made the draft; NaN: not known."""
    path = Path(draft).expanduser()
    run, result = RunDirectory(path.parent), None
    with suppress(ConfigError):  # files of another program
        known = path.name == "draft" and is_run(run.read_manifest() or {})
        result = run.read_result() if known else None
    after: dict[str, float] = (result or {}).get("after") or {}
    return after.get("expected_acceptance", math.nan)


def load_beside(
    target: HfModel, path: str | Path, device: str = "auto", *, parallel: bool = True
) -> HfModel:
    """Load a model in the target's number format, on its device if `device` is "auto".

    A draft is not spread over several GPUs, even if the target is. `parallel`: one with a mask
    token proposes a block in one pass.
    """
    device = str(target.device) if device == "auto" else device
    model = load_model(path, dtype=target.dtype, device=device)
    check_same_vocabulary(target, model)
    if not parallel:
        model.mask_token = None
    return model


def sample_texts(
    writer: Model,
    prompts: Sequence[Sequence[int]],
    config: Writing,
    sampling: SamplingParams,
    progress: Progress = silent,
) -> list[list[int]]:
    """Sample a text after each prompt, with seeds of their own."""
    written: dict[int, list[int]] = {}
    progress("sampling text", 0, len(prompts))
    for rows in batches_of_like_length(list(map(len, prompts)), config.batch_size):
        seeds = [config.seed + row for row in rows]
        batch = [prompts[row] for row in rows]
        texts = sample_completions(writer, batch, seeds, config.max_new_tokens, sampling=sampling)
        written |= zip(rows, texts, strict=True)
        progress("sampling text", len(written), len(prompts))
    return [written[row] for row in range(len(prompts))]
