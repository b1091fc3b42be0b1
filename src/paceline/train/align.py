"""Aligns a draft with its target: set-up, training, and figures before and after.

Paper: Zhou et al. 2023, Alg. A.2.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.examples import build_examples
from paceline.data.prompts import corpus_fingerprint, read_records
from paceline.data.replay import TargetRounds
from paceline.data.sources import (
    BatchSource,
    BlendedText,
    ExampleStream,
    FixedText,
    MixedText,
    Origins,
    ReadText,
    SampledText,
)
from paceline.data.tokens import asked
from paceline.errors import ConfigError, PromptError
from paceline.models import prepare_for_decoding
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from paceline.models.drafts.restricted_head import count_tokens
from paceline.models.loading import (
    fingerprint_if_there,
    load_head,
    load_model,
    load_tokenizer,
    stored_dtype,
    tokenizer_of,
)
from paceline.progress import silent
from paceline.rng import named_generator
from paceline.train.checkpoint import Adapter
from paceline.train.evaluation import held_out_evaluator
from paceline.train.loop import TrainingLoop, TrainingText, train
from paceline.train.lora import ADAPTER, add_adapter, restore_adapter
from paceline.train.loss import LossVocabulary, StepPlan, VocabularySample
from paceline.train.objectives import UnderRule, reads_top
from paceline.train.parallel import prepare_for_masks
from paceline.train.run import open_run
from paceline.train.step import Stepper, freeze_embeddings, freeze_layers, train_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.data.collate import TokenRow
    from paceline.data.prompts import Record
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.train.config import AlignConfig
    from paceline.train.run import TrainingRun


def align(config: AlignConfig, *, resume: bool = False, progress: Progress = silent) -> Path:
    """Align the draft with the target in the run directory `config.output`.

    Args:
        config: The run's configuration.
        resume: Resume the run if its directory exists; a finished run is not changed.
        progress: Called with the progress of each stage.

    Returns:
        The run directory, with the aligned draft in `draft/` and its figures in `result.json`.

    Raises:
        UsageError: invalid model, text or setting.
        TrainingError: training failed or was stopped; checkpoints are kept.
        StorageError: a file could not be written; checkpoints are kept.
    """
    with open_run(config, _inputs(config), resume=resume, progress=progress) as run:
        if run is not None:
            loop = _set_up(config, run)
            train(loop, product="draft", stored_dtype=stored_dtype(config.draft))
    return config.output


def _inputs(config: AlignConfig) -> dict[str, str]:
    """Fingerprints of the inputs, without pretraining text, which may be corrected during a run."""
    marks = {
        "target": fingerprint_if_there(config.target),
        "draft": fingerprint_if_there(config.draft),
        "data.train": corpus_fingerprint(config.data.train),
    }
    if config.data.held_out is not None:
        marks["data.held_out"] = corpus_fingerprint(config.data.held_out)
    return marks


def _set_up(config: AlignConfig, run: TrainingRun) -> TrainingLoop:
    """Models, optimizer, text and evaluation, as the latest checkpoint left them."""
    # the draft has the target's tokenizer
    reader = config.target if config.loads_target else config.draft
    store = run.open_checkpoints(reader)
    bfloat16 = run.takes_bfloat16()
    draft = run.load_trained(config.draft, store, again=config.lora is not None)
    target = _load_target(config, run, bfloat16=bfloat16)
    vocab_size = _check_pair(config, target, draft)
    if config.parallel is not None:
        evaluated = config.evaluation.max_prompt_tokens + config.evaluation.max_new_tokens
        longest = max(sum(config.lengths), evaluated if config.evaluates else 0)
        prepare_for_masks(draft, config.parallel, longest)
    if config.lora is not None:
        add_adapter(draft, config.lora, config.seed)
        store.adapter = Adapter(config.lora, config.draft)
        if (latest := store.latest()) is not None:
            restore_adapter(draft, latest / ADAPTER)
    else:
        train_all(draft)
        if config.freeze_embeddings:
            freeze_embeddings(draft)
        freeze_layers(draft, config.freeze_layers)
    records, held_out = records_of(config)
    tokenizer, chat = tokenizer_of(target or draft, config.target), config.data.chat
    records = asked(records, tokenizer, chat)
    held_out = None if held_out is None else asked(held_out, tokenizer, chat)
    stream = stream_of(config, run, records, target or draft)
    sizes = {"vocab_size": vocab_size, "bfloat16": bfloat16}
    stepper = Stepper(draft, target, config, run.accelerator, **sizes)
    text = text_of(config, run, stream, draft, target)
    evaluator = None
    if run.is_main and held_out is not None and target is not None:
        evaluator = held_out_evaluator(config, run, held_out, target, vocab_size)
    return TrainingLoop(
        run,
        store,
        stepper,
        text,
        partial(_plan, config, _vocabulary(config, stream.examples, draft, vocab_size)),
        evaluator=evaluator,
        evaluate_every=config.evaluation.every_steps,
    )


def _load_target(config: AlignConfig, run: TrainingRun, *, bfloat16: bool) -> HfModel | None:
    """The target or its head, ready to be read; None if only its tokenizer is needed."""
    if not config.loads_target:
        return None
    device = str(run.accelerator.device)
    if device == "cuda":  # of a single process: over several GPUs if the first cannot hold it
        device = "auto"
    load = load_head if config.data.recorded_states else load_model
    return load(config.target, dtype="bfloat16" if bfloat16 else "float32", device=device)


def _plan(
    config: AlignConfig, vocabulary: VocabularySample | None, position: float, num_drawn: int
) -> StepPlan:
    """A step's plan, from the run's position in [0, 1] and the number of examples drawn."""
    seed, tokens = config.seed, None
    if vocabulary is not None:
        tokens = vocabulary.draw(named_generator(seed, "loss vocabulary", num_drawn))
    rng_of_row = partial(named_generator, seed, "tokens of the draft", num_drawn)
    finish, parallel = config.finish, config.parallel
    if finish is not None and position > finish.begin:
        return StepPlan(finish.objective, tokens, rng_of_row, 1, parallel)
    return StepPlan(config.objective, tokens, rng_of_row, 0, parallel)


def _check_pair(config: AlignConfig, target: HfModel | None, draft: HfModel) -> int:
    """Check what the models must fit. -> the number of tokens that they share."""
    if target is not None:
        vocab_size = check_same_vocabulary(target, draft)
    else:
        vocab_size = check_same_tokenizer(load_tokenizer(config.target, alone=True), draft)
    _check_terms(config, draft)
    _check_encoder_decoder(config, draft)
    return vocab_size


def _check_terms(config: AlignConfig, draft: HfModel) -> None:
    """Check the objective of a draft with a restricted vocabulary.

    Positions with other labels are dropped from steps with cross entropy alone; a divergence needs
    them.
    """
    if draft.draft_vocabulary is None:
        return
    limit = f"but {config.draft} proposes only {len(draft.draft_vocabulary):,} tokens"
    together = [config.objective, () if config.finish is None else config.finish.objective]
    labelled = [{term.reads_target or term.reads_top for term in terms} for terms in together]
    if {True, False} in labelled:
        raise ConfigError(
            f"cross_entropy with a divergence needs every label, {limit}; remove one of them"
        )
    for term in config.terms:
        if isinstance(term, UnderRule):
            raise ConfigError(
                f"a {term.kind} objective needs the full vocabulary, {limit}; use a divergence, or "
                "a draft that proposes all tokens"
            )


def _check_encoder_decoder(config: AlignConfig, draft: HfModel) -> None:
    """Refuse settings that an encoder-decoder has no use for."""
    if draft.decoder_prompt is None:
        return
    rounds = config.target_rounds
    settings = {
        "data.pack_documents": config.data.pack_documents,
        "data.pretraining": config.data.pretraining is not None,
        "target_rounds.train_prompts": rounds is not None and rounds.train_prompts,
    }
    for name, is_set in settings.items():
        if is_set:
            raise ConfigError(
                f"{name} is set, but it only applies to decoder-only models, and "
                f"{config.draft} is an encoder-decoder; unset it"
            )


def _vocabulary(
    config: AlignConfig, examples: Sequence[TokenRow], draft: HfModel, vocab_size: int
) -> VocabularySample | None:
    """Sampler of the tokens that divergences are computed over; None: all tokens.

    A draft with a restricted vocabulary ranks its tokens itself; otherwise corpus frequencies do.
    """
    if draft.draft_vocabulary is not None:
        tokens_K = draft.draft_vocabulary.cpu()
        default = LossVocabulary(frequent=len(tokens_K))
        return VocabularySample(config.loss_vocabulary or default, tokens_K)
    if config.loss_vocabulary is None:
        return None
    counts_V = count_tokens((example.tokens for example in examples), vocab_size)
    return VocabularySample(config.loss_vocabulary, counts_V.argsort(descending=True, stable=True))


def records_of(config: AlignConfig) -> tuple[list[Record], list[Record] | None]:
    """Training records and held-out records (None: no evaluation)."""
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
            f"{len(unique)} different prompts; set it to fewer, or to null and set data.held_out"
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
    run.check_batches(config.pretraining_rows, "rows of pretraining text", steps=1)
    examples = build_examples(
        records,
        tokenizer,
        config.lengths,
        eos_token_ids=reader.eos_token_ids,
        pack_documents=config.data.pack_documents,
        decoder_prompt=reader.decoder_prompt,
        recorded_states=config.data.recorded_states,
    )
    if config.loads_target:  # the reader is the target then
        _check_width(examples, reader, config)
    own_rows = config.batch_size - config.pretraining_rows
    return ExampleStream(examples, own_rows, seed=config.seed, shard=run.shard)


def _check_width(examples: Sequence[TokenRow], target: HfModel, config: AlignConfig) -> None:
    """Check that recorded hidden states are as wide as the target's."""
    width = target.head_weight.shape[1]
    for example in examples if config.data.recorded_states else ():
        states_TD = example.target_hidden_TD
        if states_TD is not None and states_TD.shape[1] != width:
            raise PromptError(
                f"{example.where} has hidden states of {states_TD.shape[1]} values, and "
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
    reader = target or draft
    source: BatchSource = _mixture(config, run, stream, draft, reader)
    if config.data.pretraining is not None:
        own = config.data.pretraining, reader, config.target, config.pretraining_rows
        source = BlendedText(source, stream, run.packed_text(*own))
    return TrainingText(source, stream)


def _mixture(
    config: AlignConfig,
    run: TrainingRun,
    stream: ExampleStream,
    draft: HfModel,
    target: HfModel,
) -> MixedText:
    generation: dict[str, Any] = {
        "sampling": config.sampling,
        "max_new_tokens": config.max_completion_tokens,
        "eos_token_ids": target.eos_token_ids,
    }
    fractions = {"fixed_fraction": config.fixed_fraction, "draft_fraction": config.draft_fraction}
    origins = Origins(stream, **fractions)
    draft_writer = run.writer_of(draft) if config.draft_writes else draft
    by_target = _text_of_target(config, run, origins, target, generation)
    fixed = FixedText(stream)
    if config.fixed_fraction > 0:
        fixed.check(recorded=reads_top(config.terms))
    limit_gb = config.data.keep_states_gb
    return MixedText(
        origins,
        fixed if not limit_gb or not config.fixed_fraction else ReadText(stream, target, limit_gb),
        SampledText(stream, draft_writer, "draft", **generation),
        by_target,
    )


def _text_of_target(
    config: AlignConfig,
    run: TrainingRun,
    origins: Origins,
    target: HfModel,
    generation: dict[str, Any],
) -> BatchSource:
    """Text that the target generates, batch by batch or in rounds."""
    rounds, stream = config.target_rounds, origins.stream
    # Prepared only if the target generates text, because the copy takes memory, and large bfloat16
    # batches are faster without.
    if config.target_writes and (rounds is None or target.dtype != torch.bfloat16):
        target = prepare_for_decoding(target)
    if rounds is not None:
        in_rounds = generation | {"shard": run.shard, "progress": run.progress, "origins": origins}
        return TargetRounds(stream, target, rounds, **in_rounds)
    return SampledText(stream, target, "target", **generation)
