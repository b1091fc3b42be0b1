"""Aligns a draft with its target: set-up, training, and figures before and after.

Paper: Zhou et al. 2023, Alg. A.2.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.data.examples import Lengths
from paceline.data.prompts import corpus_fingerprint
from paceline.errors import ConfigError
from paceline.models.compatibility import check_fits, check_same_tokenizer, check_same_vocabulary
from paceline.models.drafts.restricted_head import count_tokens
from paceline.models.loading import (
    fingerprint_if_there,
    load_head,
    load_model,
    load_tokenizer,
    stored_dtype,
)
from paceline.progress import silent
from paceline.rng import named_generator
from paceline.train.evaluation import held_out_evaluator
from paceline.train.loop import TrainingLoop, train
from paceline.train.loss import LossVocabulary, StepPlan, VocabularySample
from paceline.train.objectives import UnderRule
from paceline.train.run import open_run
from paceline.train.step import Stepper
from paceline.train.training_text import records_of, stream_of, text_of
from paceline.train.weights import freeze_embeddings, freeze_layers, shard_target, train_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.data.examples import Example
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
    draft = run.load_trained(config.draft, store)
    target = _load_target(config, run, bfloat16=bfloat16)
    vocab_size = _check_pair(config, target, draft)
    if target is not None and config.shard and run.shard.world_size > 1:
        shard_target(target, run.accelerator)
    train_all(draft)
    if config.freeze_embeddings:
        freeze_embeddings(draft)
    freeze_layers(draft, config.freeze_layers)
    records, held_out = records_of(config)
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
        Planner(config, _vocabulary(config, stream.examples, draft, vocab_size)),
        evaluator=evaluator,
        evaluate_every=config.evaluation.every_steps,
    )


def _load_target(config: AlignConfig, run: TrainingRun, *, bfloat16: bool) -> HfModel | None:
    """The target or its head, ready to be read; None if only its tokenizer is needed."""
    if not config.loads_target:
        return None
    device = str(run.accelerator.device)
    if config.shard and run.shard.world_size > 1:  # the full target may not fit on one device
        device = "cpu"
    elif device == "cuda":  # of a single process: over several GPUs if the first cannot hold it
        device = "auto"
    load = load_head if config.data.recorded_states else load_model
    return load(config.target, dtype="bfloat16" if bfloat16 else "float32", device=device)


class Planner:
    """Plans a step from the run's position in [0, 1] and the number of examples drawn."""

    def __init__(self, config: AlignConfig, vocabulary: VocabularySample | None) -> None:
        self.config = config
        self.vocabulary = vocabulary

    def __call__(self, position: float, num_drawn: int) -> StepPlan:
        seed = self.config.seed
        tokens = None
        if self.vocabulary is not None:
            tokens = self.vocabulary.draw(named_generator(seed, "loss vocabulary", num_drawn))
        rng_of_row = partial(named_generator, seed, "tokens of the draft", num_drawn)
        finish = self.config.finish
        if finish is not None and position > finish.begin:
            return StepPlan(finish.objective, tokens, rng_of_row, phase=1)
        return StepPlan(self.config.objective, tokens, rng_of_row)


def _check_pair(config: AlignConfig, target: HfModel | None, draft: HfModel) -> int:
    """Check what the models must fit. -> the number of tokens that they share."""
    if target is not None:
        vocab_size = check_same_vocabulary(target, draft)
    else:
        vocab_size = check_same_tokenizer(load_tokenizer(config.target, alone=True), draft)
    _check_lengths(config, target, draft)
    _check_terms(config, draft)
    _check_encoder_decoder(config, draft)
    return vocab_size


def _check_lengths(config: AlignConfig, target: HfModel | None, draft: HfModel) -> None:
    settings = config.evaluation
    longest = {("max_prompt_tokens", "max_completion_tokens"): config.lengths}
    if config.evaluates:
        names = ("evaluation.max_prompt_tokens", "max_new_tokens")
        longest[names] = Lengths(settings.max_prompt_tokens, settings.max_new_tokens)
    for model, name in ((target, "the target"), (draft, "the draft")):
        for names, lengths in longest.items():
            if model is not None:
                check_fits(model, *lengths, names, name)


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
        "shard": bool(config.shard),
    }
    for name, is_set in settings.items():
        if is_set:
            raise ConfigError(
                f"{name} is set, but it only applies to decoder-only models, and "
                f"{config.draft} is an encoder-decoder; unset it"
            )


def _vocabulary(
    config: AlignConfig, examples: Sequence[Example], draft: HfModel, vocab_size: int
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
