"""The text that alignment trains on and is judged by, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch

from paceline.data.examples import Lengths, build_examples
from paceline.data.hidden_state_cache import ReadText
from paceline.data.packing import PackedText
from paceline.data.prompts import read_records
from paceline.data.replay import TargetRounds
from paceline.data.sources import BatchSource, ExampleStream, FixedText, MixedText, SampledText
from paceline.errors import ConfigError
from paceline.models import prepare_for_decoding
from paceline.models.loading import tokenizer_of
from paceline.rng import named_generator
from paceline.train.run import check_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.data.prompts import Record
    from paceline.data.replay import WritingClock
    from paceline.data.sources import Shard
    from paceline.models.contract import Model
    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress
    from paceline.records import RunDirectory
    from paceline.train.align_config import AlignConfig


def lengths_of(config: AlignConfig) -> Lengths:
    return Lengths(config.max_prompt_tokens, config.max_completion_tokens)


def records_of(config: AlignConfig) -> tuple[list[Record], list[Record] | None]:
    """The training corpus, and what the draft is judged by (None: nothing).

    Raises:
        PromptError: as `read_records`.
        ConfigError: nothing is left to train on.
    """
    data = config.data
    train = read_records(data.train)
    if data.held_out is not None:
        return train, read_records(data.held_out)
    if data.held_out_from_train is None:
        return train, None
    different = list({record.content: record for record in reversed(train)}.values())
    if data.held_out_from_train >= len(different):
        raise ConfigError(
            f"data.held_out_from_train is {data.held_out_from_train}, but {data.train.path} has "
            f"{len(different)} different texts; hold out fewer, or name data.held_out"
        )
    order = torch.randperm(len(different), generator=named_generator(config.seed, "held out"))
    held_out = [different[index] for index in order[: data.held_out_from_train].tolist()]
    taken = {record.content for record in held_out}
    return [record for record in train if record.content not in taken], held_out


def stream_of(
    config: AlignConfig, records: Sequence[Record], target: CausalModel, shard: Shard
) -> ExampleStream:
    """The training corpus, tokenised and cut to size."""
    tokenizer = tokenizer_of(target, config.target)
    check_batches(config, config.batch_size, shard)
    check_batches(config, config.pretraining_rows, shard, "rows of pretraining text")
    examples = build_examples(
        records,
        tokenizer,
        lengths_of(config),
        eos_token_id=cast("int | None", tokenizer.eos_token_id),
        train_document_prompts=config.data.train_document_prompts,
        pack_documents=config.data.pack_documents,
    )
    own_rows = config.batch_size - config.pretraining_rows
    return ExampleStream(examples, own_rows, seed=config.seed, shard=shard)


def source_of(
    config: AlignConfig,
    stream: ExampleStream,
    draft: Model,
    target: CausalModel,
    shard: Shard,
    progress: Progress,
    writing: WritingClock,
) -> MixedText:
    """Alg. A.2's mix; a recipe that uses one kind of text has fractions of 0 and 1."""
    read_by = target
    # a copy for writing takes memory: only for a target that writes
    own = config.fixed_fraction < 1
    # a hundred rows at once: what multiplies bfloat16 attends faster in it, too
    in_rounds = config.target_rounds is not None and target.dtype == torch.bfloat16
    if own and config.draft_fraction < 1 and not in_rounds:
        target = prepare_for_decoding(target)
    writers: tuple[tuple[Model, Literal["draft", "target"]], ...]
    writers = (draft, "draft"), (target, "target")
    drafted: BatchSource
    written: BatchSource
    drafted, written = (
        SampledText(
            stream,
            model,
            origin,
            sampling=config.sampling,
            max_new_tokens=config.max_completion_tokens,
            eos_token_ids=target.eos_token_ids,
        )
        for model, origin in writers
    )
    if config.target_rounds is not None:
        written = TargetRounds(
            stream,
            target,
            config.target_rounds,
            sampling=config.sampling,
            max_new_tokens=config.max_completion_tokens,
            eos_token_ids=target.eos_token_ids,
            shard=shard,
            progress=progress,
            clock=writing,
        )
    kept_gb = config.data.keep_states_gb
    fixed = FixedText(stream)
    if config.fixed_fraction > 0:
        fixed.check()
    return MixedText(
        stream,
        fixed if kept_gb is None else ReadText(stream, read_by, kept_gb),
        drafted,
        written,
        fixed_fraction=config.fixed_fraction,
        draft_fraction=config.draft_fraction,
    )


def pretraining_of(
    config: AlignConfig, target: CausalModel, shard: Shard, run: RunDirectory
) -> PackedText | None:
    """The text that the draft knows, read as it is needed."""
    if config.data.pretraining is None:
        return None
    assert target.tokenizer is not None, "asked before"
    return PackedText(
        config.data.pretraining,
        target.tokenizer,
        sum(lengths_of(config)),
        config.pretraining_rows,
        eos_token_id=cast("int | None", target.tokenizer.eos_token_id),
        seed=config.seed,
        shard=shard,
        marks=run.path / "packing.jsonl",
    )
