"""Plans a run of generate-data: its tokens, hours, size and cost, from a short measurement."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import mean_interval
from paceline.data.input_checks import checked
from paceline.data.request_answering import ShardWriter
from paceline.data.requests import ModelWriter, Shard, plan_shards
from paceline.data.shards import ShardStore
from paceline.engines.text_config import OpenAIWriter
from paceline.errors import UsageError
from paceline.models.loading import encoder_decoder_at, load_tokenizer
from paceline.progress import silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.data.requests import GenerateDataConfig, Request
    from paceline.progress import Progress

_ROUNDS = 4  # of requests in flight, in a part that is measured: its end is idle in part


class Range(StrictModel):
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Range:
        """The same, times a factor."""
        return Range(value=factor * self.value, low=factor * self.low, high=factor * self.high)


class RunPlan(StrictModel):
    """A run, as its measured part predicts it.

    Attributes:
        num_measured: Answers that were measured, in `measured_s` seconds, by one worker.
        prompt_tokens: Of all prompts, counted.
        tokens_per_answer: Mean number of generated tokens.
        new_tokens: Generated tokens of the run.
        tokens_per_s: Generated tokens per second.
        hours: Of one worker.
        bytes_per_token: Of the files, per generated token.
        bytes: Size of the files.
        cost: Hours times the price per hour; None without a price.
    """

    num_records: int
    num_measured: int
    measured_s: float
    prompt_tokens: int
    tokens_per_answer: Range
    new_tokens: Range
    tokens_per_s: float
    hours: Range
    bytes_per_token: float
    bytes: Range
    cost: Range | None


def plan_run(
    config: GenerateDataConfig,
    seconds: float,
    price_per_hour: float | None = None,
    progress: Progress = silent,
) -> RunPlan:
    """Answer some of the run's requests for about `seconds`, and predict the run.

    The requests are a random sample in which every temperature has its share. Loading a model or
    starting a server is not measured. Nothing is kept.

    Raises:
        UsageError: A model, a prompt or a setting is invalid, or two answers were not measured.
        EngineError: No server answers.
    """
    checked(config)
    served = not isinstance(config.writer, ModelWriter)
    encoder = not served and encoder_decoder_at(config.target)
    tokenizer = load_tokenizer(config.target, alone=served)
    shards = plan_shards(config, tokenizer, encoder=encoder)
    with tempfile.TemporaryDirectory(prefix="paceline-plan.") as folder:
        measured = _measure(config, shards, Path(folder), seconds, progress)
    return _plan(shards, measured, price_per_hour)


class _Measured(NamedTuple):
    lengths: list[int]
    seconds: float
    num_bytes: int


def _measure(
    config: GenerateDataConfig,
    shards: Sequence[Shard],
    folder: Path,
    seconds: float,
    progress: Progress,
) -> _Measured:
    store = ShardStore(folder)
    with closing(ShardWriter(config, folder)) as write:
        first = shards[0]
        write(Shard("warm-up", first.requests[:1]))  # loads, starts and compiles
        (folder / "warm-up").unlink()
        begun = time.monotonic()
        passed, num_answers = 0.0, 0
        for part in _parts(config, shards):
            write(part)
            passed = time.monotonic() - begun
            num_answers += len(part.requests)
            progress("measuring", min(passed, seconds), seconds)
            if passed >= seconds and num_answers > 1:
                break
    answers = store.read()
    lengths = [len(answer.completion_tokens) for answer in answers]
    store.write("whole", answers)  # small files are larger
    size = (folder / "whole").stat().st_size
    return _Measured(lengths, passed, size)


def _parts(config: GenerateDataConfig, shards: Sequence[Shard]) -> Iterator[Shard]:
    """Parts of the run in random order, each of one temperature; all have their share."""
    waiting: dict[float, list[Request]] = {}
    for shard in shards:
        waiting.setdefault(shard.requests[0].temperature, []).extend(shard.requests)
    totals = {temperature: len(requests) for temperature, requests in waiting.items()}
    for requests in waiting.values():
        order = torch.randperm(len(requests), generator=named_generator(config.seed, "plan"))
        requests[:] = [requests[index] for index in order.tolist()]
    size = _part_size(config)
    for number in itertools.count():
        chosen = max(waiting, key=lambda name: len(waiting[name]) / totals[name])
        part, waiting[chosen] = waiting[chosen][:size], waiting[chosen][size:]
        if not part:
            return
        yield Shard(f"{number:05d}.parquet", tuple(part))


def _part_size(config: GenerateDataConfig) -> int:
    match config.writer:
        case ModelWriter():
            return config.batch_size
        case OpenAIWriter() as writer:
            return _ROUNDS * writer.concurrency * len(writer.urls)
        case writer:
            return _ROUNDS * writer.concurrency


def _plan(shards: Sequence[Shard], measured: _Measured, price_per_hour: float | None) -> RunPlan:
    requests = [request for shard in shards for request in shard.requests]
    if len(measured.lengths) < 2:
        raise UsageError("a plan needs at least 2 answers, and the run has 1; start it without one")
    found = mean_interval(torch.tensor(measured.lengths, dtype=torch.float64))
    per_answer = Range(value=found.value, low=max(1.0, found.low), high=found.high)
    total = sum(measured.lengths)
    new_tokens = per_answer.scaled(len(requests))
    tokens_per_s = total / measured.seconds
    hours = new_tokens.scaled(1 / tokens_per_s / 3600)
    per_token = measured.num_bytes / total
    return RunPlan(
        num_records=len(requests),
        num_measured=len(measured.lengths),
        measured_s=measured.seconds,
        prompt_tokens=sum(len(request.tokens) for request in requests),
        tokens_per_answer=per_answer,
        new_tokens=new_tokens,
        tokens_per_s=tokens_per_s,
        hours=hours,
        bytes_per_token=per_token,
        bytes=new_tokens.scaled(per_token),
        cost=None if price_per_hour is None else hours.scaled(price_per_hour),
    )
