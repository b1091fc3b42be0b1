"""Trains a new or existing model on next-token prediction.

For an encoder-decoder this is supervised fine-tuning on pairs of source and target text.
"""

# N trained positions, D hidden
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, model_validator

from paceline.config import Options, StrictModel
from paceline.core.divergences import Mean
from paceline.core.fused import chunks
from paceline.core.text_scores import nats_of
from paceline.data.collate import collate
from paceline.data.examples import build_examples
from paceline.data.prompts import (
    CorpusConfig,
    corpus_fingerprint,
    read_records,
    stream_records,
)
from paceline.data.sources import ExampleStream, FixedText
from paceline.errors import ConfigError, PromptError, UsageError
from paceline.models.chat_text import text_of
from paceline.models.compatibility import check_fits
from paceline.models.drafts.scratch import AnyNewModel, NewTokenizer, write_new_model
from paceline.models.loading import fingerprint_if_there, stored_dtype, tokenizer_of
from paceline.progress import silent
from paceline.records import RunDirectory
from paceline.train.checkpoint import check_run_directory
from paceline.train.config import TrainSettings
from paceline.train.loop import TrainingLoop, TrainingText, train
from paceline.train.loss import StepPlan, places_of
from paceline.train.objectives import CrossEntropy
from paceline.train.optim import AdamW, Optimizer
from paceline.train.run import open_run
from paceline.train.step import Stepper, train_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline.data.collate import TokenRow
    from paceline.data.input_checks import InputChecks
    from paceline.data.prompts import Record
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.train.loop import Figures
    from paceline.train.run import TrainingRun

_MOST_EVALUATED, _ROWS = 256, 32  # held-out texts, and those of a batch
_CHUNK = 256  # positions per chunk of probabilities


class PretrainData(StrictModel):
    """Training and held-out text.

    Attributes:
        train: Documents, or prompts with completions; prompt tokens have no loss. An
            encoder-decoder needs completions.
        held_out: Text for evaluation, in the same form; None: no evaluation.
        pack_documents: Concatenate documents before splitting them into rows, without padding.
        streaming: Stream text that does not fit in memory. All texts are packed as documents and
            shuffled within blocks.
    """

    train: CorpusConfig
    held_out: CorpusConfig | None = None
    pack_documents: bool = True
    streaming: bool = False

    @model_validator(mode="after")
    def _streams_packed(self) -> PretrainData:
        if self.streaming and not self.pack_documents:
            raise ValueError("streaming needs pack_documents; set pack_documents=true")
        return self


class PretrainConfig(TrainSettings):
    """One pretraining run; see also `TrainSettings`. The model is saved to `output/model`.

    Attributes:
        model: Architecture of a new model; or hub id, directory or GGUF file of a model to
            continue from, which is not changed.
        tokenizer: Tokenizer of a new model: trained on the text, or that of the named model.
        evaluate_every: Steps between evaluations; None: only before and after training.
        stored_dtype: Data type of the saved weights of a new model.
    """

    model: AnyNewModel
    tokenizer: NewTokenizer | str = NewTokenizer()
    data: Annotated[PretrainData, Options(data="train")]
    evaluate_every: int | None = Field(default=None, ge=1)
    stored_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    mean: Mean = "token"
    optimizer: Optimizer = AdamW()

    def check(self, checks: InputChecks) -> None:
        check_run_directory(RunDirectory(self.output), self, resume=checks.resume)
        start = checks.model("model", self.model) if isinstance(self.model, str) else None
        if start is None and isinstance(self.tokenizer, str):
            checks.model("tokenizer", self.tokenizer)
        checks.texts(self.data, "train", "held_out")
        self.check_output(checks, start)


def pretrain(config: PretrainConfig, *, resume: bool = False, progress: Progress = silent) -> Path:
    """Train a model on text in the run directory `config.output`.

    Args:
        config: The run's configuration.
        resume: Resume the run if its directory exists; a finished run is not changed.
        progress: Called with the progress of each stage.

    Returns:
        The run directory, with the trained model in `model/` and its figures in `result.json`.

    Raises:
        UsageError: invalid model, text or setting.
        TrainingError: training failed or was stopped; checkpoints are kept.
        StorageError: a file could not be written; checkpoints are kept.
    """
    with open_run(config, _inputs(config), resume=resume, progress=progress) as run:
        if run is not None:
            train(_set_up(config, run), product="model", stored_dtype=_stored_dtype(config))
    return config.output


def _inputs(config: PretrainConfig) -> dict[str, str]:
    """Fingerprints of the inputs, without streamed text, which may be corrected during a run."""
    streaming = config.data.streaming
    marks = {} if streaming else {"data.train": corpus_fingerprint(config.data.train)}
    if config.data.held_out is not None:
        marks["data.held_out"] = corpus_fingerprint(config.data.held_out)
    if isinstance(config.model, str):
        marks["model"] = fingerprint_if_there(config.model)
    return marks


class HeldOutLoss:
    """Evaluates the next-token loss on held-out text.

    A draft with a restricted vocabulary is evaluated on labels that it can propose.
    """

    headline = "loss"

    def __init__(self, rows: Sequence[TokenRow], device: torch.device) -> None:
        self.batches = [
            collate(rows[start : start + _ROWS]).to(device) for start in range(0, len(rows), _ROWS)
        ]

    @torch.no_grad()
    def evaluate(self, model: HfModel) -> Figures:
        """Evaluate a model on these texts.

        loss: nats per token. accuracy: fraction of labels that are the argmax.
        """
        head = model.plain_head
        vocabulary = _vocabulary(model)
        if vocabulary is not None:
            head = head.rows(vocabulary[0])
        loss, num_correct, count = 0.0, 0, 0
        for batch in self.batches:
            hidden_ND = model.hidden(batch)[batch.mask_BT]
            labels_N = batch.labels_BT[batch.mask_BT]
            if vocabulary is not None:
                labels_N, known_N = places_of(labels_N, vocabulary[0], len(model.head_weight))
                hidden_ND, labels_N = hidden_ND[known_N], labels_N[known_N]
            for rows in chunks(len(labels_N), _CHUNK):
                log_probs_CV = head.log_probs(hidden_ND[rows])
                labels_C = labels_N[rows]
                loss += nats_of(log_probs_CV, labels_C)
                num_correct += int((log_probs_CV.argmax(-1) == labels_C).sum())
            count += len(labels_N)
        if count == 0:
            raise UsageError(
                "the draft cannot propose any token of the held-out text; choose another text"
            )
        return {
            "loss": loss / count,
            "accuracy": num_correct / count,
            "num_tokens": float(count),
        }


def _vocabulary(model: HfModel) -> tuple[Tensor, Tensor] | None:
    """Tokens of a restricted vocabulary and their logit offsets, 0. Other labels have no loss."""
    if model.draft_vocabulary is None:
        return None
    return model.draft_vocabulary, torch.zeros(len(model.draft_vocabulary))


def _set_up(config: PretrainConfig, run: TrainingRun) -> TrainingLoop:
    """Model, optimizer, text and evaluation, as the latest checkpoint left them."""
    run.check_batches(config.batch_size)
    train = config.data.train
    records = () if config.data.streaming else read_records(train, skip_empty=True)
    start = _start(config, run, records or stream_records(train))
    store = run.open_checkpoints(start)
    model = run.load_trained(start, store)
    _check_length(config, model)
    text = _text(config, run, records, model)
    train_all(model)
    bfloat16 = run.takes_bfloat16()
    sizes = {"vocab_size": len(model.head_weight), "bfloat16": bfloat16}
    stepper = Stepper(model, None, config, run.accelerator, **sizes)
    plan = StepPlan((CrossEntropy(),), _vocabulary(model))
    return TrainingLoop(
        run,
        store,
        stepper,
        text,
        lambda _position, _num_drawn: plan,
        evaluator=_evaluator(config, model) if run.is_main else None,
        evaluate_every=config.evaluate_every,
    )


def _text(
    config: PretrainConfig, run: TrainingRun, records: Sequence[Record], model: HfModel
) -> TrainingText:
    if config.data.streaming:
        path = str(config.model)
        packed = run.packed_text(config.data.train, model, path, config.batch_size)
        return TrainingText(packed, packed)
    examples = _examples(config, records, model)
    stream = ExampleStream(examples, config.batch_size, seed=config.seed, shard=run.shard)
    text = FixedText(stream)
    text.check()
    return TrainingText(text, stream)


def _start(config: PretrainConfig, run: TrainingRun, records: Iterable[Record]) -> str | Path:
    """The initial model; a new one is created once, as `start` in the run directory."""
    if isinstance(config.model, str):
        return config.model
    out = run.directory.path / "start"
    if run.is_main and not out.exists():
        write_new_model(config.model, config.tokenizer, _texts(records), out, seed=config.seed)
    run.accelerator.wait_for_everyone()
    return out


def _texts(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        parts = (record.text, record.completion, *(text_of(m["content"]) for m in record.messages))
        for part in parts:
            if isinstance(part, list):
                raise PromptError(
                    f"{record.where} has token ids, but a new tokenizer needs text; set tokenizer "
                    "to the model whose tokenizer was used"
                )
            if part:
                yield part


def _stored_dtype(config: PretrainConfig) -> torch.dtype | None:
    if isinstance(config.model, str):
        return stored_dtype(config.model)
    return getattr(torch, config.stored_dtype)


def _check_length(config: PretrainConfig, model: HfModel) -> None:
    names = ("max_prompt_tokens", "max_completion_tokens")
    check_fits(model, *config.lengths, names, "the model")
    if model.decoder_prompt is not None and config.data.streaming:
        raise ConfigError(
            "data.streaming is set, but it only applies to decoder-only models, and the model is "
            "an encoder-decoder; unset it"
        )


def _examples(config: PretrainConfig, records: Sequence[Record], model: HfModel) -> list[TokenRow]:
    tokenizer = tokenizer_of(model, str(config.model))
    return build_examples(
        records,
        tokenizer,
        config.lengths,
        eos_token_ids=model.eos_token_ids,
        pack_documents=config.data.pack_documents,
        decoder_prompt=model.decoder_prompt,
    )


def _evaluator(config: PretrainConfig, model: HfModel) -> HeldOutLoss | None:
    if config.data.held_out is None:
        return None
    examples = _examples(config, read_records(config.data.held_out, skip_empty=True), model)
    rows = [
        example
        for example in examples[:_MOST_EVALUATED]
        if example.trained_from < len(example.tokens)
    ]
    if not rows:
        raise PromptError(
            f"{config.data.held_out.path} has only prompts without completions; add completions, "
            "or unset data.held_out"
        )
    return HeldOutLoss(rows, model.device)
