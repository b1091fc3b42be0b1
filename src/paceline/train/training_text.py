"""Builds the training and held-out text of an alignment run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.data.examples import build_examples
from paceline.data.packing import PackedText
from paceline.data.prompts import read_records
from paceline.data.replay import Rounds, ServedRounds, TargetRounds, WritingClock
from paceline.data.sources import (
    BatchSource,
    BlendedText,
    ExampleStream,
    FixedText,
    MixedText,
    Origins,
    SampledText,
)
from paceline.engines.texts import OpenAIWriter
from paceline.errors import ConfigError, PromptError
from paceline.models import prepare_for_decoding
from paceline.models.loading import load_tokenizer, tokenizer_of
from paceline.rng import named_generator
from paceline.train.loop import TrainingText
from paceline.train.objectives import reads_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.data.examples import Example
    from paceline.data.prompts import CorpusConfig, Record
    from paceline.models.hf.base import HfModel
    from paceline.train.config import AlignConfig
    from paceline.train.run import TrainingRun


_SERVED_BATCHES = 16  # of training, in a round that servers write if none is configured


def records_of(config: AlignConfig) -> tuple[list[Record], list[Record] | None]:
    """Training records and held-out records (None: no evaluation).

    Raises:
        PromptError: see `read_records`.
        ConfigError: no training text is left.
    """
    data = config.data
    train = read_records(data.train, skip_empty=True)
    if data.held_out is not None:
        return train, read_records(data.held_out, skip_empty=True)
    if data.held_out_from_train is None:
        return train, None
    unique = list({record.asked: record for record in reversed(train)}.values())
    if data.held_out_from_train >= len(unique):
        raise ConfigError(
            f"data.held_out_from_train is {data.held_out_from_train}, but {data.train.path} has "
            f"{len(unique)} different prompts; hold out fewer, or set data.held_out"
        )
    order = torch.randperm(len(unique), generator=named_generator(config.seed, "held out"))
    held_out = [unique[index] for index in order[: data.held_out_from_train].tolist()]
    taken = {record.asked for record in held_out}
    return [record for record in train if record.asked not in taken], held_out


def stream_of(
    config: AlignConfig, run: TrainingRun, records: Sequence[Record], reader: HfModel
) -> ExampleStream:
    """The tokenised and truncated training corpus."""
    tokenizer = tokenizer_of(reader, config.target)
    run.check_batches(config.batch_size)
    run.check_batches(config.pretraining_rows, "rows of pretraining text")
    examples = build_examples(
        records,
        tokenizer,
        config.lengths,
        eos_token_ids=reader.eos_token_ids,
        pack_documents=config.data.pack_documents,
        decoder_prompt=reader.decoder_prompt,
        recorded_states=config.data.recorded_states,
    )
    _check_width(examples, reader, config)
    own_rows = config.batch_size - config.pretraining_rows
    return ExampleStream(examples, own_rows, seed=config.seed, shard=run.shard)


def _check_width(examples: Sequence[Example], target: HfModel, config: AlignConfig) -> None:
    """Check that recorded hidden states are as wide as the target's."""
    width = target.head_weight.shape[1]
    for example in examples if config.data.recorded_states else ():
        if example.hidden_TD is not None and example.hidden_TD.shape[1] != width:
            raise PromptError(
                f"{example.where} has hidden states of {example.hidden_TD.shape[1]} values, and "
                f"{config.target} has {width}; name the target that recorded them"
            )


def text_of(
    config: AlignConfig,
    run: TrainingRun,
    stream: ExampleStream,
    draft: HfModel,
    target: HfModel | None,
) -> TrainingText:
    """The mixture of Alg. A.2, with pretraining text if it is configured."""
    reader, writing = target or draft, WritingClock()
    source: BatchSource = _mixture(config, run, stream, draft, reader, writing)
    if config.data.pretraining is not None:
        own = config.data.pretraining, reader, config.target, config.pretraining_rows
        source = BlendedText(source, stream, packed_text(run, *own))
    return TrainingText(source, stream, writing)


def _mixture(
    config: AlignConfig,
    run: TrainingRun,
    stream: ExampleStream,
    draft: HfModel,
    target: HfModel,
    writing: WritingClock,
) -> MixedText:
    generation: dict[str, Any] = {
        "sampling": config.sampling,
        "max_new_tokens": config.max_completion_tokens,
        "eos_token_ids": target.eos_token_ids,
    }
    fractions = {"fixed_fraction": config.fixed_fraction, "draft_fraction": config.draft_fraction}
    origins = Origins(stream, **fractions)
    draft_writer = run.writer_of(draft) if config.draft_writes else draft
    by_target = _text_of_target(config, run, origins, target, generation, writing)
    fixed = FixedText(stream)
    if config.fixed_fraction > 0:
        fixed.check(recorded=reads_top(config.terms))
    return MixedText(
        origins,
        fixed,
        SampledText(stream, draft_writer, "draft", **generation),
        by_target,
    )


def _text_of_target(
    config: AlignConfig,
    run: TrainingRun,
    origins: Origins,
    target: HfModel,
    generation: dict[str, Any],
    writing: WritingClock,
) -> BatchSource:
    """Text that the target or its servers generate, batch by batch or in rounds."""
    rounds, stream = config.target_rounds, origins.stream
    in_rounds = generation | {"shard": run.shard, "progress": run.progress}
    in_rounds |= {"clock": writing, "origins": origins}
    if isinstance(config.writer, OpenAIWriter):
        batches = min(_SERVED_BATCHES, config.num_steps or _SERVED_BATCHES)
        rounds = rounds or Rounds(rows=stream.batch_size * batches, uses=1)
        tokenizer = load_tokenizer(config.target, alone=True)
        return ServedRounds(config.writer, tokenizer, stream, target, rounds, **in_rounds)
    # Prepared only if the target generates text, because the copy takes memory, and large bfloat16
    # batches are faster without.
    if config.target_writes and (rounds is None or target.dtype != torch.bfloat16):
        target = prepare_for_decoding(target)
    if rounds is not None:
        return TargetRounds(stream, target, rounds, **in_rounds)
    return SampledText(stream, target, "target", **generation)


def packed_text(
    run: TrainingRun, corpus: CorpusConfig, model: HfModel, path: str, rows: int
) -> PackedText:
    """A corpus that is streamed, as packed documents; `path` is the model's, for errors."""
    tokenizer = tokenizer_of(model, path)
    return PackedText(
        corpus,
        tokenizer,
        sum(run.config.lengths),
        rows,
        eos_token_ids=model.eos_token_ids,
        seed=run.config.seed,
        shard=run.shard,
        marks=run.directory.path / "packing.jsonl",
    )
