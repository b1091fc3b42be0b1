"""Generates the answers to the requests of a file in batches."""

from __future__ import annotations

import multiprocessing.util
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.core.sampling import SamplingParams
from paceline.data.borders import inner_tokens
from paceline.data.requests import ModelWriter
from paceline.data.shards import Answer, ShardStore
from paceline.data.top_scores import Recorded, record
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.commands import Room
from paceline.engines.contract import Request as ServedRequest
from paceline.engines.engine_choice import Setup, check_choice
from paceline.engines.start import running
from paceline.engines.text_answers import tokens_of
from paceline.engines.text_config import EngineWriter, OpenAIWriter
from paceline.engines.text_servers import TextServers
from paceline.errors import ContextLengthError, PromptError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.answer_text import answer_text
from paceline.models.compatibility import check_fits
from paceline.models.contract import decoder_contexts
from paceline.models.loading import fingerprint, load_tokenizer, tokenizer_of
from paceline.progress import silent
from paceline.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from paceline.data.requests import GenerateDataConfig, Request, Shard
    from paceline.data.shards import Journal
    from paceline.decode import Generation
    from paceline.decode.decoder import Decoder
    from paceline.engines.text_answers import Written
    from paceline.models.hf.base import HfModel
    from paceline.models.loading import DType


class Answerer:
    """Answers requests with the target and an optional draft."""

    def __init__(self, config: GenerateDataConfig) -> None:
        self.config = config
        self.target = self._load(config.target, config.dtype)
        self.draft = None if config.draft is None else self._load(config.draft, self.target.dtype)
        self.tokenizer = tokenizer_of(self.target, config.target)
        self._check_lengths()
        self.dtype = str(self.target.dtype).removeprefix("torch.")
        configurable = self.target.device.type == "cpu" and self.dtype == "bfloat16"
        self.activations = config.activations if configurable else self.dtype
        self.target_fingerprint = fingerprint(config.target)
        self.draft_fingerprint = "" if config.draft is None else fingerprint(config.draft)

    def _check_lengths(self) -> None:
        config = self.config
        lengths = config.max_prompt_tokens, config.max_new_tokens
        for model in (self.target, self.draft):
            if model is not None:
                check_fits(model, *lengths, ("max_prompt_tokens", "max_new_tokens"), "the model")
        room = self._decoder(1.0).room([0])  # includes one block
        wanted = sum(lengths) if self.target.decoder_prompt is None else 1 + config.max_new_tokens
        if room is not None and wanted > room + 1:
            raise ContextLengthError(
                f"prompts and new tokens need a context of {wanted}, but these models support only "
                f"{room + 1}; lower max_prompt_tokens or max_new_tokens"
            )

    def answer(self, shard: Shard, _journal: Journal) -> list[Answer]:
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
    ) -> Sequence[Recorded]:
        writer = self.config.writer
        assert isinstance(writer, ModelWriter), "the writer of this class"
        if not writer.top_logprobs and not writer.hidden_states:
            return [Recorded()] * len(requests)
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

    def _record(self, request: Request, generation: Generation, recorded: Recorded) -> Answer:
        config = self.config
        text = generation.tokens[:-1] if generation.stop_reason == "eos" else generation.tokens
        context = decoder_contexts(self.target, [request.tokens])[0]
        return Answer(
            **provenance(config, request),
            prompt=text_of(self.tokenizer, request.tokens),
            completion=text_of(self.tokenizer, text, context),
            completion_tokens=generation.tokens,
            stop_reason=generation.stop_reason,
            target_fingerprint=self.target_fingerprint,
            draft=config.draft or "",
            draft_fingerprint=self.draft_fingerprint,
            num_speculative_tokens=0 if config.draft is None else config.num_speculative_tokens,
            dtype=self.dtype,
            activations=self.activations,
            top_tokens=None if recorded.top is None else recorded.top.tokens,
            top_log_probs=None if recorded.top is None else recorded.top.log_probs,
            hidden_states=recorded.hidden,
        )


class ServerAnswerer:
    """Answers requests with servers; the target gives the tokenizer."""

    def __init__(self, config: GenerateDataConfig, writer: OpenAIWriter) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.target, alone=True)
        self.end = cast("int | None", self.tokenizer.eos_token_id)
        self.servers = TextServers(writer, self._tokenize)

    def answer(self, shard: Shard, journal: Journal) -> list[Answer]:
        """One record per request, in order; each is in the journal as soon as it is there."""
        found = journal.read()
        missing = [request for request in shard.requests if request.id not in found]
        sampling = SamplingParams(
            temperature=shard.requests[0].temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
        )
        wanted = [
            ServedRequest(request.tokens, self.config.max_new_tokens, sampling, request.seed)
            for request in missing
        ]

        def keep(index: int, written: Written) -> None:
            answer = self._record(missing[index], written)
            journal.append(answer)
            found[answer.id] = answer

        self.servers.write(wanted, keep)
        return [found[request.id] for request in shard.requests]

    def _record(self, request: Request, written: Written) -> Answer:
        ended = written.stop_reason == "eos"
        tokens = tokens_of(
            written, lambda text: tokens_behind(self.tokenizer, request.tokens, text), self.end
        )
        has_end = ended and tokens[-1:] and tokens[-1] in self.tokenizer.all_special_ids
        completion = written.text
        if written.tokens is not None:
            text = tokens[:-1] if has_end else tokens
            completion = text_of(self.tokenizer, text, request.tokens)
        top = written.top
        return Answer(
            **provenance(self.config, request),
            prompt=text_of(self.tokenizer, request.tokens),
            completion=completion,
            completion_tokens=tokens,
            stop_reason=written.stop_reason,
            target_fingerprint="",
            draft="",
            draft_fingerprint="",
            num_speculative_tokens=0,
            dtype="",
            activations="",
            server=written.server,
            top_tokens=None if top is None else [[token for token, _ in each] for each in top],
            top_log_probs=None if top is None else [[value for _, value in each] for each in top],
        )

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def provenance(config: GenerateDataConfig, request: Request) -> dict[str, Any]:
    """The columns of a record that do not depend on its answer, but for the prompt's text."""
    return {
        "id": request.id,
        "prompt_tokens": list(request.tokens),
        "temperature": request.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": request.seed,
        "system_prompt": request.system_prompt,
        "source": request.source,
        "prompt_was_cut": request.cut,
        "target": config.target,
        "max_new_tokens": config.max_new_tokens,
        "paceline": __version__,
    }


def text_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], prompt: Sequence[int] = ()
) -> str:
    """The text of tokens behind those of the prompt, special tokens included."""
    return answer_text(tokenizer, tokens, prompt, skip_special_tokens=False)


def tokens_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], text: str
) -> list[int]:
    """Tokens of a server's text behind a prompt; a text alone may begin with a space of its own."""
    try:
        return inner_tokens(prompt, text, tokenizer)
    except PromptError as error:
        warnings.warn(f"an answer is tokenised without its prompt: {error}", stacklevel=2)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


class ShardWriter:
    """Answers the requests of a shard and writes its file.

    The first call loads the models or starts the server, which ends at `close` or with the process.
    """

    def __init__(self, config: GenerateDataConfig, directory: Path) -> None:
        self._config = config
        self._store = ShardStore(directory)
        self._answerer: Answerer | ServerAnswerer | None = None
        self._end: multiprocessing.util.Finalize | None = None

    def __call__(self, shard: Shard) -> None:
        if self._answerer is None:
            with ExitStack() as stack:
                self._answerer = _answerer(self._config, stack)
                close = stack.pop_all().close
            self._end = multiprocessing.util.Finalize(None, close, exitpriority=0)
        journal = self._store.journal(shard.name)
        self._store.write(shard.name, self._answerer.answer(shard, journal))
        journal.remove()

    def close(self) -> None:
        """Stop the server, if one was started."""
        if self._end is not None:
            self._end()


def _answerer(config: GenerateDataConfig, stack: ExitStack) -> Answerer | ServerAnswerer:
    """`stack`: gets what has to be closed."""
    match config.writer:
        case ModelWriter():
            return Answerer(config)
        case OpenAIWriter() as writer:
            return ServerAnswerer(config, writer)
        case EngineWriter() as writer:
            url = stack.enter_context(_own_server(config, writer))
            return ServerAnswerer(config, writer.at(url))


@contextmanager
def _own_server(config: GenerateDataConfig, writer: EngineWriter) -> Iterator[str]:
    """Start a server. -> its URL.

    Raises:
        UsageError: The program is not installed.
        EngineError: The server does not start.
    """
    choice = writer.engine
    if choice.engine == "vllm" and writer.top_logprobs:
        options = (*choice.options, "--max-logprobs", str(writer.top_logprobs))
        choice = choice.model_copy(update={"options": options})
    check_choice(choice)
    room = Room(config.max_prompt_tokens + config.max_new_tokens, writer.concurrency)
    # a worker process has a device of its own; Ray hides the other ones
    own = config.engine == "processes" and config.workers > 1 and torch.cuda.is_available()
    gpu = torch.cuda.current_device() if own else None
    setup = Setup(choice.target or config.target, None, room, config.dtype, gpu)
    with running(choice, setup, silent) as client:
        yield client.url
