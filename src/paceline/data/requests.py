"""Plans the requests for distillation data: each prompt at several temperatures.

An answer depends only on its request, seed included, and on the models. Requests can therefore be
answered in any order and by any number of workers, and a run can be resumed.

Paper: Goel et al. 2024, section 2.2: seed instructions answered at temperatures {0, 0.3, 0.7, 1}
and top-p 0.95, under various system prompts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from paceline.config import HomePath, Options, StrictModel
from paceline.data.prompts import ChatOrRaw, CorpusConfig, Record, read_records
from paceline.data.tokens import asked, encode_prompt, truncated, warn_of_cut
from paceline.engines.texts import MAY_CHANGE, OpenAIWriter
from paceline.errors import ConfigError, PromptError
from paceline.models.chat_text import text_of
from paceline.models.compatibility import check_fits
from paceline.records import RunDirectory
from paceline.rng import hashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.input_checks import InputChecks


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelWriter(StrictModel):
    """The target answers here, in this process or in workers.

    Attributes:
        top_logprobs: Also record the K most likely tokens of each position with their log
            probabilities, to distil from (0: none).
        hidden_states: Also record the hidden states that the head reads, rounded to bfloat16: 2
            bytes per hidden value and token. They give all probabilities.
    """

    kind: Literal["model"] = "model"
    top_logprobs: int = Field(default=0, ge=0)
    hidden_states: bool = False


Writer = Annotated[ModelWriter | OpenAIWriter, Field(discriminator="kind")]


class GenerateDataConfig(StrictModel):
    """Configuration of `generate-data`.

    Attributes:
        target: Hub id, directory or GGUF file of the model that answers; with a server as writer,
            its tokenizer is enough.
        writer: `{kind: model}`: the target is loaded here. `{kind: openai, url: ...}`: servers with
            an OpenAI-compatible endpoint answer; see `OpenAIWriter`.
        draft: Draft model for speculative decoding; null: decode with the target alone.
        num_speculative_tokens: Drafted tokens per block; used only with a draft.
        output: Run directory; the records are Parquet files in `output/data`.
        prompts: Corpus of prompts, chats or documents.
        chat: Ask texts as messages of the user; false: as they are; unset: prompts are messages if
            the tokenizer has a chat template, and documents are continued. Records with messages
            always use the template.
        system_prompts: System prompts for chats that have none, used in turn; each is used for one
            pass through `temperatures`.
        num_per_prompt: Answers per prompt, each at the next temperature.
        temperatures: Sampling temperatures, used in turn; each prompt starts at the next one.
        top_p: Nucleus sampling: keep the smallest set of tokens with this probability.
        top_k: Sample only from the K most likely tokens; 0: all.
        max_prompt_tokens: Maximum prompt length; prompts keep their last tokens, plain documents
            their first.
        max_new_tokens: Maximum number of tokens per answer.
        batch_size: Answers generated per batch.
        activations: Precision of activations on a CPU; `bfloat16` is faster, but less exact.
        shard_size: Records per file; a killed worker loses at most one file.
        workers: Number of processes, or of Ray actors.
        pool: `processes` on this machine, or actors of a `ray` cluster.
        dtype: Data type of the models' weights.
    """

    target: str = Field(min_length=1)
    writer: Writer = ModelWriter()
    draft: Annotated[str | None, Options()] = None
    num_speculative_tokens: int = Field(default=3, ge=1)
    output: HomePath
    prompts: CorpusConfig
    chat: ChatOrRaw = None
    system_prompts: tuple[str, ...] = ()
    num_per_prompt: Annotated[int, Options()] = Field(default=1, ge=1)
    temperatures: tuple[Temperature, ...] = Field(default=(0.0, 0.3, 0.7, 1.0), min_length=1)
    top_p: Annotated[float, Options()] = Field(default=0.95, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_prompt_tokens: Annotated[int, Options()] = Field(default=512, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=256, ge=1)
    batch_size: int = Field(default=32, ge=1)
    activations: Literal["float32", "bfloat16"] = "bfloat16"
    shard_size: int = Field(default=512, ge=1)
    workers: Annotated[int, Options()] = Field(default=1, ge=1)
    pool: Literal["processes", "ray"] = "processes"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0

    @model_validator(mode="after")
    def _servers_have_their_own_draft(self) -> GenerateDataConfig:
        if self.draft is not None and not isinstance(self.writer, ModelWriter):
            raise ValueError("draft is for a target that is loaded here; give it to the server")
        return self

    def check_run(
        self, run: RunDirectory, *, resume: bool, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Raise ConfigError if the directory holds another run, as `RunDirectory.check`."""
        may_change = {"output", "workers", "pool", *MAY_CHANGE}  # they do not affect the records
        begun = any((run.path / "data").glob("*.parquet"))
        run.check(self, begun=begun, resume=resume, may_change=may_change, inputs=inputs)

    def check(self, checks: InputChecks) -> None:
        self.check_run(RunDirectory(self.output), resume=checks.resume)
        models: list[Any] = []
        if isinstance(self.writer, ModelWriter):
            models = checks.pair(self.target, self.draft)
            tokenizer = models[0].tokenizer
        else:
            tokenizer = checks.tokenizer("target", self.target)
            if self.writer.hidden_states:
                checks.model("target", self.target)
            checks.key(self.writer)
        checks.text("prompts", self.prompts)
        checks.first_prompt(tokenizer, self.prompts, self.chat)
        lengths = self.max_prompt_tokens, self.max_new_tokens
        for model in models[:1]:  # the target goes on behind a draft's context
            check_fits(model, *lengths, ("max_prompt_tokens", "max_new_tokens"), str(model.path))
        checks.output(self.output)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate.

    Attributes:
        id: `PROMPT/N` for answer N to a prompt.
        tokens: The target's input tokens.
        seed: Random seed of this answer.
    """

    id: str
    tokens: tuple[int, ...]
    temperature: float
    seed: int


class Shard(NamedTuple):
    """The requests of one file, all at the same temperature."""

    name: str
    requests: tuple[Request, ...]


def plan_shards(
    config: GenerateDataConfig, tokenizer: PreTrainedTokenizerBase, *, encoder: bool = False
) -> list[Shard]:
    """Distribute the run's requests over files; deterministic for a configuration and its prompts.

    `encoder`: the target is an encoder-decoder.

    Raises:
        PromptError: no prompts, a malformed one, a duplicate id, or no chat template.
        ConfigError: system prompts, but no prompt is a chat.
    """
    requests = plan_requests(config, read_records(config.prompts), tokenizer, encoder=encoder)
    parts: list[tuple[Request, ...]] = []
    for temperature in sorted(set(config.temperatures)):
        chosen = [request for request in requests if request.temperature == temperature]
        size = config.shard_size
        parts += [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]
    total = len(parts)
    return [Shard(f"{i:05d}-of-{total:05d}.parquet", part) for i, part in enumerate(parts)]


def plan_requests(
    config: GenerateDataConfig,
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    encoder: bool = False,
) -> list[Request]:
    """The requests in the order of the prompts, without duplicates of greedy answers."""
    records = asked(records, tokenizer, config.chat)
    if config.system_prompts and all(record.kind != "chat" for record in records):
        raise ConfigError(
            f"system_prompts is set, but {config.prompts.path} has no chats; set chat to true, or "
            "unset system_prompts"
        )
    requests: list[Request] = []
    limit, lengths = config.max_prompt_tokens, list[int]()
    num_temperatures = len(config.temperatures)
    systems = config.system_prompts or ("",)
    for index, (name, record) in enumerate(_named(records)):
        encoded: dict[str, list[int]] = {}
        greedy: set[str] = set()  # system prompts of the greedy answers
        # A decoder-only target continues a document, so its first tokens are the prompt.
        continues = record.kind == "document" and not encoder
        for answer in range(config.num_per_prompt):
            round_, position = divmod(index + answer, num_temperatures)
            temperature = config.temperatures[position]
            # One system prompt per pass through the temperatures gives all combinations.
            system, prompt = _with_system(record, systems[round_ % len(systems)])
            if temperature == 0 and system in greedy:
                continue
            if temperature == 0:
                greedy.add(system)
            if system not in encoded:
                encoded[system] = encode_prompt(prompt, tokenizer)
            tokens = encoded[system]
            if len(tokens) > limit and not continues and answer == 0:
                lengths.append(len(tokens))
            requests.append(
                Request(
                    id=f"{name}/{answer}",
                    tokens=tuple(truncated(tokens, limit, prompt, tokenizer, encoder=encoder)),
                    temperature=temperature,
                    seed=hashed(f"{config.seed}\x1f{name}/{answer}"),
                )
            )
    side = "right" if encoder else "left"
    warn_of_cut(lengths, f"{len(records)} prompts", limit, side=side)
    return requests


def _named(records: Iterable[Record]) -> Iterable[tuple[str, Record]]:
    """Records with their ids; a record without one gets its index."""
    seen: dict[str, str] = {}
    for index, record in enumerate(records):
        name = str(index) if record.id is None else record.id
        if name in seen:
            raise PromptError(
                f"{record.where} has the id {name}, as {seen[name]} has; make ids unique, or omit "
                "them"
            )
        seen[name] = record.where
        yield name, record


def _with_system(record: Record, system: str) -> tuple[str, Record]:
    """System prompt in use, and the record with it."""
    if record.kind != "chat":
        return "", record
    messages = record.messages
    if messages[0]["role"] == "system":
        return text_of(messages[0]["content"]), record
    if system:
        messages = ({"role": "system", "content": system}, *messages)
    return system, dataclasses.replace(record, messages=messages)
