"""What a target is asked when it writes distillation data: each prompt, at several temperatures.

A request's answer hangs on the request alone, seed included, so that data can be made in any order, by
any number of workers, stopped and gone on with.

Paper: Goel et al. 2024, section 2.2: seed instructions answered at temperatures {0, 0.3, 0.7, 1} and
top-p 0.95, under various system prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from paceline.config import StrictModel
from paceline.data.prompts import CorpusConfig, Record, read_records
from paceline.data.tokens import encode, warn_of_cut_prompts
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GenerateDataConfig(StrictModel):
    """One run of `generate-data`.

    Attributes:
        target: Hub id, directory or GGUF file of the model that answers.
        draft: Of a draft to speculate with: the same distribution, another speed. None: none.
        num_speculative_tokens: Of a block, with a draft.
        output: The run directory; `output/data` holds Parquet files.
        prompts: Seed prompts, chats, or documents of which the first tokens are the prompt.
        format: `chat` puts prompts into the tokenizer's chat template as a user's message; `plain`
            gives them as they are. Chats are chats either way.
        system_prompts: In chats that have none, in turn with every round of temperatures; empty: none.
        num_per_prompt: Answers to each prompt, at the temperatures in turn.
        temperatures: Taken in turn, beginning one further for each prompt.
        top_p: Nucleus of the answers.
        top_k: The same by count; 0: all.
        max_prompt_tokens: Longer prompts lose their beginning; a document's first so many are its prompt.
        max_new_tokens: Longest answer.
        batch_size: Texts that are written at a time.
        activations: `bfloat16` is faster where the processor multiplies it, and rounds.
        shard_size: Records of a file: written whole, and so what a killed run loses at most.
        workers: Processes of this machine, or actors of the cluster.
        engine: `processes` of this machine, or `ray` on as many machines as its cluster has.
        dtype: Of the models.
    """

    target: str = Field(min_length=1)
    draft: str | None = None
    num_speculative_tokens: int = Field(default=3, ge=1)
    output: Path
    prompts: CorpusConfig
    format: Literal["plain", "chat"] = "plain"
    system_prompts: tuple[str, ...] = ()
    num_per_prompt: int = Field(default=1, ge=1)
    temperatures: tuple[Temperature, ...] = (0.0, 0.3, 0.7, 1.0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_prompt_tokens: int = Field(default=512, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    batch_size: int = Field(default=32, ge=1)
    activations: Literal["float32", "bfloat16"] = "bfloat16"
    shard_size: int = Field(default=512, ge=1)
    workers: int = Field(default=1, ge=1)
    engine: Literal["processes", "ray"] = "processes"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0

    @field_validator("temperatures")
    @classmethod
    def _at_least_one(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if not temperatures:
            raise ValueError("temperatures is empty; give at least one, such as 1.0")
        return temperatures


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One answer that is wanted.

    Attributes:
        id: Of the prompt, and which answer to it.
        source: Where the prompt stands.
        tokens: What the target reads.
        seed: Of the answer.
        cut: Has the prompt lost something for its length?
    """

    id: str
    source: str
    system_prompt: str
    tokens: tuple[int, ...]
    temperature: float
    seed: int
    cut: bool


class Shard(NamedTuple):
    """The requests of one file, all of one temperature."""

    name: str
    requests: tuple[Request, ...]


def plan_shards(config: GenerateDataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Shard]:
    """Every file of the run and what is in it; the same for the same configuration and prompts.

    Raises:
        PromptError: no prompts, a malformed one, two with one id, or no chat template.
    """
    requests = plan_requests(config, read_records(config.prompts), tokenizer)
    parts: list[tuple[Request, ...]] = []
    for temperature in sorted(set(config.temperatures)):
        some = [request for request in requests if request.temperature == temperature]
        size = config.shard_size
        parts += [tuple(some[start : start + size]) for start in range(0, len(some), size)]
    return [
        Shard(f"{index:05d}-of-{len(parts):05d}.parquet", part) for index, part in enumerate(parts)
    ]


def plan_requests(
    config: GenerateDataConfig, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase
) -> list[Request]:
    """Prompt by prompt. A greedy answer that would only be repeated is left out."""
    requests: list[Request] = []
    num_cut, most = 0, config.max_prompt_tokens
    num_temperatures = len(config.temperatures)
    for index, (name, record) in enumerate(_named(records)):
        systems = config.system_prompts or ("",)
        known: dict[str, list[int]] = {}
        asked: set[tuple[float, str]] = set()
        # a document is meant to be longer: the target writes what comes then
        begins = record.kind == "document" and config.format == "plain"
        for answer in range(config.num_per_prompt):
            turn = index + answer
            temperature = config.temperatures[turn % num_temperatures]
            # one further with every round of temperatures, so that each meets each
            system, posed = _posed(
                record, systems[turn // num_temperatures % len(systems)], config.format
            )
            if temperature == 0 and (temperature, system) in asked:
                continue
            asked.add((temperature, system))
            if system not in known:
                known[system] = encode(posed, tokenizer)[0]
            tokens = known[system]
            cut = len(tokens) > most and not begins
            num_cut += cut and answer == 0
            requests.append(
                Request(
                    id=f"{name}/{answer}",
                    source=record.where,
                    system_prompt=system,
                    tokens=tuple(tokens[:most] if begins else tokens[-most:]),
                    temperature=temperature,
                    seed=_seed(config.seed, f"{name}/{answer}"),
                    cut=cut,
                )
            )
    warn_of_cut_prompts(num_cut, len(records), most)
    return requests


def _named(records: Iterable[Record]) -> Iterable[tuple[str, Record]]:
    """Each with its own id, or its number."""
    seen: dict[str, str] = {}
    for index, record in enumerate(records):
        name = str(index) if record.id is None else record.id
        if name in seen:
            raise PromptError(
                f"{record.where} has the id {name}, as {seen[name]} has; make ids unique, or leave "
                "them out"
            )
        seen[name] = record.where
        yield name, record


def _posed(record: Record, system: str, form: str) -> tuple[str, Record]:
    """As it is put to the target, and the system prompt that is there: without a known completion.

    Raises:
        PromptError: tokens, which no chat template can be put around.
    """
    messages = record.messages
    if record.kind == "chat":
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    elif form == "plain":
        return "", dataclasses.replace(record, completion=None)
    elif isinstance(record.text, str):
        messages = ({"role": "user", "content": record.text},)
    else:
        raise PromptError(
            f"{record.where} has tokens, and format chat puts a template around text; give text, or "
            "set format to plain"
        )
    if messages[0]["role"] == "system":
        system = messages[0]["content"]
    elif system:
        messages = ({"role": "system", "content": system}, *messages)
    return system, dataclasses.replace(record, kind="chat", messages=messages, completion=None)


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}\x1f{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
