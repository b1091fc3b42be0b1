"""Builds the training and held-out text of an alignment run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.data.examples import Lengths, build_examples
from paceline.data.packing import PackedText
from paceline.data.prompts import read_records
from paceline.data.replay import Rounds, ServedRounds, TargetRounds
from paceline.data.requests import ModelWriter
from paceline.data.sources import (
    BatchSource,
    ExampleStream,
    FixedText,
    MixedText,
    ReadText,
    SampledText,
)
from paceline.engines.texts import OpenAIWriter
from paceline.errors import ConfigError, PromptError
from paceline.models import prepare_for_decoding
from paceline.models.loading import load_tokenizer, tokenizer_of
from paceline.rng import named_generator
from paceline.train.objectives import reads_top
from paceline.train.run import check_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.data.examples import Example
    from paceline.data.prompts import Record
    from paceline.data.replay import WritingClock
    from paceline.data.sources import Shard
    from paceline.models.contract import Model
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.records import RunDirectory
    from paceline.train.align_config import AlignConfig


_SERVED_BATCHES = 16  # of training, in a round that servers write if none is configured


def lengths_of(config: AlignConfig) -> Lengths:
    return Lengths(config.max_prompt_tokens, config.max_completion_tokens)


def records_of(config: AlignConfig) -> tuple[list[Record], list[Record] | None]:
    """Training records and held-out records (None: no evaluation).

    Raises:
        PromptError: see `read_records`.
        ConfigError: no training text is left.
    """
    data = config.data
    train = read_records(data.train)
    if data.held_out is not None:
        return train, read_records(data.held_out)
    if data.held_out_from_train is None:
        return train, None
    unique = list({record.content: record for record in reversed(train)}.values())
    if data.held_out_from_train >= len(unique):
        raise ConfigError(
            f"data.held_out_from_train is {data.held_out_from_train}, but {data.train.path} has "
            f"{len(unique)} different texts; hold out fewer, or set data.held_out"
        )
    order = torch.randperm(len(unique), generator=named_generator(config.seed, "held out"))
    held_out = [unique[index] for index in order[: data.held_out_from_train].tolist()]
    taken = {record.content for record in held_out}
    return [record for record in train if record.content not in taken], held_out


def stream_of(
    config: AlignConfig, records: Sequence[Record], target: HfModel, shard: Shard
) -> ExampleStream:
    """The tokenised and truncated training corpus."""
    tokenizer = tokenizer_of(target, config.target)
    check_batches(config, config.batch_size, shard)
    check_batches(config, config.pretraining_rows, shard, "rows of pretraining text")
    examples = build_examples(
        records,
        tokenizer,
        lengths_of(config),
        eos_token_id=cast("int | None", tokenizer.eos_token_id),
        eos_token_ids=target.eos_token_ids,
        train_document_prompts=config.data.train_document_prompts,
        pack_documents=config.data.pack_documents,
        decoder_prompt=target.decoder_prompt,
        recorded_states=config.data.recorded_states,
    )
    _check_width(examples, target, config)
    own_rows = config.batch_size - config.pretraining_rows
    return ExampleStream(examples, own_rows, seed=config.seed, shard=shard)


def _check_width(examples: Sequence[Example], target: HfModel, config: AlignConfig) -> None:
    """Check that recorded hidden states are as wide as the target's."""
    width = target.head_weight.shape[1]
    for example in examples if config.data.recorded_states else ():
        if example.hidden_TD is not None and example.hidden_TD.shape[1] != width:
            raise PromptError(
                f"{example.where} has hidden states of {example.hidden_TD.shape[1]} values, and "
                f"{config.target} has {width}; name the target that recorded them"
            )


def source_of(
    config: AlignConfig,
    stream: ExampleStream,
    draft: Model,
    target: HfModel,
    shard: Shard,
    progress: Progress,
    writing: WritingClock,
) -> MixedText:
    """The mixture of Alg. A.2."""
    plain_target = target
    # prepared only if the target generates text, because the copy takes memory
    writer = config.writer
    generates = config.target_writes and isinstance(writer, ModelWriter)
    # large bfloat16 batches are faster without preparation
    in_rounds = config.target_rounds is not None and target.dtype == torch.bfloat16
    if generates and not in_rounds:
        target = prepare_for_decoding(target)
    generation: dict[str, Any] = {
        "sampling": config.sampling,
        "max_new_tokens": config.max_completion_tokens,
        "eos_token_ids": target.eos_token_ids,
    }
    by_target: BatchSource = SampledText(stream, target, "target", **generation)
    extra = {"shard": shard, "progress": progress, "clock": writing}
    if isinstance(writer, OpenAIWriter):
        batches = min(_SERVED_BATCHES, config.num_steps or _SERVED_BATCHES)
        rounds = config.target_rounds or Rounds(rows=stream.batch_size * batches, uses=1)
        tokenizer = load_tokenizer(config.target, alone=True)
        by_target = ServedRounds(writer, tokenizer, stream, target, rounds, **generation, **extra)
    elif config.target_rounds is not None:
        by_target = TargetRounds(stream, target, config.target_rounds, **generation, **extra)
    limit_gb = config.data.keep_states_gb
    fixed = FixedText(stream)
    if config.fixed_fraction > 0:
        fixed.check(recorded=reads_top(config.terms))
    return MixedText(
        stream,
        fixed if limit_gb is None else ReadText(stream, plain_target, limit_gb),
        SampledText(stream, draft, "draft", **generation),
        by_target,
        fixed_fraction=config.fixed_fraction,
        draft_fraction=config.draft_fraction,
    )


def pretraining_of(
    config: AlignConfig, target: HfModel, shard: Shard, run: RunDirectory
) -> PackedText | None:
    """Streamed pretraining text, or None."""
    if config.data.pretraining is None:
        return None
    assert target.tokenizer is not None, "checked by stream_of"
    return PackedText(
        config.data.pretraining,
        target.tokenizer,
        sum(lengths_of(config)),
        config.pretraining_rows,
        eos_token_id=cast("int | None", target.tokenizer.eos_token_id),
        eos_token_ids=target.eos_token_ids,
        seed=config.seed,
        shard=shard,
        marks=run.path / "packing.jsonl",
    )
