"""Answers the requests of a file, by the target or by servers, and stores the records."""

# N positions of completions, K recorded tokens, D hidden size
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow
import torch
from pyarrow import parquet
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from paceline.core.fused import chunks
from paceline.core.sampling import SamplingParams
from paceline.data.collate import collate
from paceline.data.requests import ModelWriter
from paceline.data.sources import rows_of
from paceline.data.tokens import AnswerEnd
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.contract import Request as ServedRequest
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.errors import UsageError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_fits
from paceline.models.contract import decoder_contexts
from paceline.models.hf.causal import for_head, last_norm
from paceline.models.loading import load_head, load_tokenizer, tokenizer_of
from paceline.models.token_text import answer_text, following_tokens, tokens_of
from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from paceline.data.requests import GenerateDataConfig, Request, Shard
    from paceline.decode import Generation
    from paceline.decode.decoder import Decoder
    from paceline.engines.answers import Written
    from paceline.models.hf.base import HfModel
    from paceline.models.loading import DType


class Answer(BaseModel):
    """One record: a prompt and the target's completion; the manifest has the settings of all.

    Attributes:
        id: `PROMPT/N` for answer N to a prompt.
        prompt: The prompt as text, chat template included.
        completion: The completion as text, without the end-of-text token.
        prompt_tokens: The target's exact input tokens.
        completion_tokens: The generated tokens, including any end-of-text token.
        stop_reason: `eos`, or `length` or `context` if the text was truncated.
        top_tokens, top_log_probs: The most likely tokens of each position and their log
            probabilities before sampling settings, most likely first, in nats; empty at a position
            for which the server gives none; None if they were not recorded.
        hidden_states: The target's hidden states before each token, bfloat16 bytes, one row per
            token; None if they were not recorded.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    prompt: str
    completion: str
    prompt_tokens: list[int]
    completion_tokens: list[int]
    stop_reason: Literal["eos", "length", "context"]
    temperature: float
    seed: int
    top_tokens: Sequence[Sequence[int]] | None = None
    top_log_probs: Sequence[Sequence[float]] | None = None
    hidden_states: bytes | None = None


_TYPES = {
    "top_tokens": pyarrow.list_(pyarrow.list_(pyarrow.int32())),
    "top_log_probs": pyarrow.list_(pyarrow.list_(pyarrow.float32())),
    "hidden_states": pyarrow.binary(),
}


class ShardStore:
    """The Parquet files of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def holds(self, name: str, num_records: int) -> bool:
        """True if the file exists, is readable and has this number of records."""
        try:
            return parquet.read_metadata(self.directory / name).num_rows == num_records
        except (OSError, pyarrow.ArrowException):
            return False

    def write(self, name: str, answers: Sequence[Answer]) -> None:
        """Write a file atomically.

        Raises:
            StorageError: the file could not be written.
        """
        table = pyarrow.Table.from_pylist([answer.model_dump() for answer in answers])
        for column, kind in _TYPES.items():  # those of a column without values are unknown
            index = table.column_names.index(column)
            table = table.set_column(index, column, table[column].cast(kind))
        with storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory, prefix=".writing.") as scratch:
                path = Path(scratch) / name
                with path.open("wb") as stream:
                    parquet.write_table(table, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                path.replace(self.directory / name)

    def columns(self, name: str, *columns: str) -> list[dict[str, Any]]:
        """These columns of a file's records; the others, such as hidden states, are not read."""
        return parquet.read_table(self.directory / name, columns=list(columns)).to_pylist()

    def sweep(self) -> None:
        """Remove the incomplete files of killed workers."""
        for scratch in self.directory.glob(".writing.*"):
            shutil.rmtree(scratch, ignore_errors=True)


class Answerer:
    """Answers requests with the target and an optional draft."""

    def __init__(self, config: GenerateDataConfig) -> None:
        self.config = config
        self.target = self._load(config.target, config.dtype)
        self.draft = None if config.draft is None else self._load(config.draft, self.target.dtype)
        self.tokenizer = tokenizer_of(self.target, config.target)
        lengths = config.max_prompt_tokens, config.max_new_tokens
        check_fits(self.target, *lengths, ("max_prompt_tokens", "max_new_tokens"), "the model")

    def answer(self, shard: Shard) -> list[Answer]:
        """One record per request, in order."""
        requests = shard.requests
        decoder = self._decoder(requests[0].temperature)
        generations = decoder.generate(
            [request.tokens for request in requests],
            self.config.max_new_tokens,
            [request.seed for request in requests],
            batch_size=self.config.batch_size,
        )
        recorded = self._recorded(requests, generations)
        return list(map(self._record, requests, generations, recorded))

    def _recorded(
        self, requests: Sequence[Request], generations: Sequence[Generation]
    ) -> Sequence[dict[str, Any]]:
        writer = self.config.writer
        assert isinstance(writer, ModelWriter), "the writer of this class"
        if not writer.top_logprobs and not writer.hidden_states:
            return [{}] * len(requests)
        prompts = [request.tokens for request in requests]
        completions = [generation.tokens for generation in generations]
        return record(
            self.target,
            prompts,
            completions,
            writer.top_logprobs,
            self.config.batch_size,
            hidden_states=writer.hidden_states,
        )

    def _load(self, source: str, dtype: DType | torch.dtype) -> HfModel:
        model = load_model(source, dtype=dtype)
        return prepare_for_decoding(model, activations=self.config.activations)

    def _decoder(self, temperature: float) -> Decoder:
        config = self.config
        sampling = SamplingParams(temperature=temperature, top_p=config.top_p, top_k=config.top_k)
        gamma = config.num_speculative_tokens
        decoder: Decoder = (
            AutoregressiveDecoder(self.target, sampling)
            if self.draft is None
            else SpeculativeDecoder(self.target, self.draft, gamma=gamma, sampling=sampling)
        )
        decoder.forces_eos = False  # a draft would learn to stop at max_new_tokens
        return decoder

    def _record(self, request: Request, generation: Generation, recorded: dict[str, Any]) -> Answer:
        text = generation.tokens[:-1] if generation.stop_reason == "eos" else generation.tokens
        context = decoder_contexts(self.target, [request.tokens])[0]
        return _answer(
            *(request, self.tokenizer),
            completion=text_of(self.tokenizer, text, context),
            completion_tokens=generation.tokens,
            stop_reason=generation.stop_reason,
            **recorded,
        )


class ServerAnswerer:
    """Answers requests with servers; the target gives the tokenizer."""

    def __init__(self, config: GenerateDataConfig, writer: OpenAIWriter) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.target, alone=True)
        self.end = AnswerEnd(self.tokenizer)
        self.head = load_head(config.target, dtype="float32") if writer.hidden_states else None
        self.norm = None if self.head is None else last_norm(self.head)
        self.servers = TextServers(writer, partial(tokens_of, tokenizer=self.tokenizer))

    def answer(self, shard: Shard) -> list[Answer]:
        """One record per request, in order."""
        requests = shard.requests
        sampling = SamplingParams(
            temperature=requests[0].temperature, top_p=self.config.top_p, top_k=self.config.top_k
        )
        wanted = [
            ServedRequest(request.tokens, self.config.max_new_tokens, sampling, request.seed)
            for request in requests
        ]
        found: dict[int, Answer] = {}

        def keep(index: int, written: Written) -> None:
            found[index] = self._record(requests[index], written)

        self.servers.write(wanted, keep)
        return [found[index] for index in range(len(requests))]

    def _record(self, request: Request, written: Written) -> Answer:
        ended = written.stop_reason == "eos"
        prompt = text_of(self.tokenizer, request.tokens)
        tokens = written.tokens_by(
            lambda text: following_tokens(prompt, request.tokens, text, self.tokenizer),
            self.end.behind(request.tokens),
        )
        has_end = ended and tokens[-1:] and tokens[-1] in self.tokenizer.all_special_ids
        completion = written.text
        if written.tokens is not None:
            text = tokens[:-1] if has_end else tokens
            completion = text_of(self.tokenizer, text, request.tokens)
        return _answer(
            *(request, self.tokenizer),
            completion=completion,
            completion_tokens=tokens,
            stop_reason=written.stop_reason,
            top_tokens=written.top_tokens,
            top_log_probs=written.top_log_probs,
            hidden_states=self._hidden(written),
        )

    def _hidden(self, written: Written) -> bytes | None:
        """The states that the head reads: those of the server behind the last norm."""
        if self.head is None or self.norm is None or written.states is None:
            return None
        wanted = self.head.head_weight.shape[1]
        if written.states.shape[1] != wanted:
            raise UsageError(
                f"the server writes hidden states of {written.states.shape[1]} values, but the "
                f"head of {self.config.target} reads {wanted}; set target to the served model"
            )
        with torch.inference_mode():
            states_1TD = written.states[None].to(self.head.device, self.head.dtype)
            return _as_bytes(for_head(self.norm(states_1TD)[0], self.head.hf))


def _answer(request: Request, tokenizer: PreTrainedTokenizerBase, **columns: Any) -> Answer:
    return Answer(
        id=request.id,
        prompt=text_of(tokenizer, request.tokens),
        prompt_tokens=list(request.tokens),
        temperature=request.temperature,
        seed=request.seed,
        **columns,
    )


def text_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], prompt: Sequence[int] = ()
) -> str:
    """The text of tokens behind those of the prompt, special tokens included."""
    return answer_text(tokenizer, tokens, prompt, skip_special_tokens=False)


class ShardWriter:
    """Answers the requests of a shard and writes its file; the first call loads the models."""

    def __init__(self, config: GenerateDataConfig, directory: Path) -> None:
        self._config = config
        self._store = ShardStore(directory)
        self._answerer: Answerer | ServerAnswerer | None = None

    def __call__(self, shard: Shard) -> None:
        if self._answerer is None:
            config, writer = self._config, self._config.writer
            self._answerer = (
                ServerAnswerer(config, writer)
                if isinstance(writer, OpenAIWriter)
                else Answerer(config)
            )
        self._store.write(shard.name, self._answerer.answer(shard))


_CHUNK = 256  # positions per chunk of probabilities


@torch.no_grad()
def record(
    model: HfModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    count: int,
    batch_size: int,
    *,
    hidden_states: bool,
) -> list[dict[str, Any]]:
    """The `count` most likely tokens before each completion token, at temperature 1.

    `hidden_states`: also the hidden states. Cost: one forward pass over prompts and completions.

    Returns:
        Columns of each record.
    """
    rows = rows_of(model, prompts, completions)
    found: list[dict[str, Any]] = []
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        batch = collate(part).to(model.device)
        hidden_ND = model.hidden(batch)[batch.mask_BT]
        lengths = [len(row.tokens) - row.trained_from for row in part]
        columns: list[dict[str, Any]] = [{} for _ in part]
        if count:
            for values, (tokens, logs) in zip(
                columns, _top(model, hidden_ND, count, lengths), strict=True
            ):
                values |= {"top_tokens": tokens.tolist(), "top_log_probs": logs.tolist()}
        if hidden_states:
            for values, states_TD in zip(columns, hidden_ND.split(lengths), strict=True):
                values["hidden_states"] = _as_bytes(states_TD)
        found += columns
    return found


def _top(
    model: HfModel, hidden_ND: Tensor, count: int, lengths: list[int]
) -> Iterable[tuple[Tensor, Tensor]]:
    """Tokens and log probabilities of each row."""
    tops = [
        model.head.log_probs(hidden_ND[chunk], model.vocab_size).topk(min(count, model.vocab_size))
        for chunk in chunks(len(hidden_ND), _CHUNK)
    ]
    log_probs_NK, tokens_NK = (torch.cat(values) for values in zip(*tops, strict=True))
    return zip(tokens_NK.split(lengths), log_probs_NK.split(lengths), strict=True)


def _as_bytes(hidden_TD: Tensor) -> bytes:
    return hidden_TD.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
