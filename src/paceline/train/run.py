"""Executes a training run: set-up, evaluation, training, saving, evaluation of the saved model.

A stopped run is resumed; a finished run is not changed.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, parse_flag_from_env

from paceline.data.input_checks import checked
from paceline.errors import ConfigError, PacelineError
from paceline.models.drafts.save import save_draft
from paceline.models.loading import load_model
from paceline.models.precision import choose_precision
from paceline.models.prepare import TrainingWriter, choose_writer
from paceline.native import compiled
from paceline.progress import silent
from paceline.records import RunDirectory, read_jsonl
from paceline.train.checkpoint import check_run_directory, clear_set_up, has_begun
from paceline.train.loop import TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.data.sources import Shard
    from paceline.models.hf.base import HfModel
    from paceline.models.precision import Choice
    from paceline.progress import Progress
    from paceline.train.checkpoint import TrainingState
    from paceline.train.loop import Figures, Parts
    from paceline.train.settings import TrainSettings

    SetUp = Callable[[Accelerator, RunDirectory, Progress], tuple[Parts, TrainingState]]
    Inputs = Callable[[], dict[str, str]]


def run_training(
    config: TrainSettings,
    set_up: SetUp,
    inputs: Inputs,
    *,
    product: str,
    resume: bool = False,
    progress: Progress = silent,
) -> Path:
    """Train, and save the model as `product` in the run directory. -> the run directory.

    `inputs` returns the fingerprints of the run's input files, by name.

    Raises:
        UsageError: invalid model, text or setting.
        TrainingError: training failed or was stopped; checkpoints are kept.
        StorageError: a file could not be written; checkpoints are kept.
    """
    _check_launcher()
    accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision="no")
    progress = progress if accelerator.is_main_process else silent
    run = RunDirectory(config.output)
    found = check_run_directory(run, config, inputs(), resume=resume)
    if _is_finished(run, config):
        return run.path
    checked(config, resume=resume)
    with ExitStack() as stack:
        _lock(run, accelerator, stack)
        _train(config, set_up, found, accelerator, run, product, progress)
    return run.path


def _lock(run: RunDirectory, accelerator: Accelerator, stack: ExitStack) -> None:
    """Lock the run until the stack closes; all processes raise the main process's error."""
    errors: list[PacelineError | None] = [None]
    if accelerator.is_main_process:
        try:
            stack.enter_context(run.alone())
        except PacelineError as error:
            errors = [error]
    broadcast_object_list(errors)
    if errors[0] is not None:
        raise errors[0]


def _train(
    config: TrainSettings,
    set_up: SetUp,
    inputs: dict[str, str],
    accelerator: Accelerator,
    run: RunDirectory,
    product: str,
    progress: Progress,
) -> None:
    if accelerator.is_main_process:
        # if this start is stopped, the result of an earlier, smaller budget must not remain
        run.result.unlink(missing_ok=True)
        if not has_begun(run):
            clear_set_up(run)
        before = run.read_manifest() if has_begun(run) else None
        if accelerator.device.type == "cuda":
            torch.cuda.init()  # so that the manifest names the GPU
        run.write_manifest(config, inputs=inputs, choices=(before or {}).get("choices", {}))
    progress("loading", 0, 1)
    compiled()  # compiles native code now instead of during the first step
    parts, state = set_up(accelerator, run, progress)
    progress("loading", 1, 1)
    loop = TrainingLoop(parts, state)
    before = _figures_before(run, loop)
    loop.run()
    draft, _ = parts.stepper.whole()
    if accelerator.is_main_process:
        _finish(parts, draft, state, before, product)
    accelerator.wait_for_everyone()


def _check_launcher() -> None:
    """Refuse accelerate's own sharding, which conflicts with that of `sharding.py`."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise ConfigError(
                f"accelerate is configured for {name}, which is not supported; launch with "
                "torchrun or accelerate launch --multi_gpu, and set shard to shard weights, "
                "gradients and optimizer state as ZeRO-3 does"
            )


def takes_bfloat16(
    config: TrainSettings,
    shapes: Sequence[tuple[int, int]],
    accelerator: Accelerator,
    run: RunDirectory,
) -> bool:
    """True if forward and backward passes run in bfloat16.

    "auto" times products of these shapes when a run begins and records the choice in its manifest.
    """
    precision: str = config.precision
    if precision == "auto":
        choose = partial(choose_precision, "training", shapes, accelerator.device)
        precision = _keep_choice(run, "precision", choose, accelerator)
    return precision == "bfloat16"


def writer_of(
    config: TrainSettings, model: HfModel, accelerator: Accelerator, run: RunDirectory
) -> HfModel | TrainingWriter:
    """The generator of training text: the model itself, or copies of its weights.

    A Llama-like model may be rounded to bfloat16. "auto" times both when a run begins and records
    the choice in its manifest.
    """
    precision: str = config.precision
    if precision == "auto":
        rows = config.batch_size // config.gradient_accumulation_steps
        choose = partial(choose_writer, model, rows)
        precision = _keep_choice(run, "writing", choose, accelerator)
    writer = TrainingWriter(model)
    copies = writer.fuses or (precision == "bfloat16" and writer.has_copies)
    return writer if copies else model


def _keep_choice(
    run: RunDirectory, name: str, choose: Callable[[], Choice], accelerator: Accelerator
) -> str:
    """The precision recorded in the manifest under this name, or the main process's choice."""
    recorded: list[str | None] = [None]
    if accelerator.is_main_process:
        recorded = [run.keep_choice(name, lambda: choose()._asdict())["precision"]]
    broadcast_object_list(recorded)
    assert recorded[0] is not None, "the main process chooses"
    return recorded[0]


def check_batches(
    config: TrainSettings, num_rows: int, shard: Shard, name: str = "batch_size"
) -> None:
    """Raise ConfigError unless the rows divide into processes and accumulation steps."""
    parts = shard.world_size * config.gradient_accumulation_steps
    if num_rows % parts:
        raise ConfigError(
            f"{name} {num_rows} cannot be split over {shard.world_size} processes with "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps}; use a multiple of "
            f"{parts}"
        )


def _is_finished(run: RunDirectory, config: TrainSettings) -> bool:
    manifest = run.read_manifest()
    if manifest is None or run.read_result() is None:
        return False
    now = config.model_dump(mode="json")
    return all(manifest["config"][key] == now[key] for key in ("num_steps", "max_seconds"))


def _figures_before(run: RunDirectory, loop: TrainingLoop) -> Figures | None:
    """Figures of the untrained model: measured, or read from the metrics of a resumed run."""
    if loop.state.step == 0:
        return loop.evaluate()
    rows = [row for row in read_jsonl(run.metrics) if row["step"] == 0]
    return rows[0]["evaluation"] if rows else None


def _finish(
    parts: Parts, draft: HfModel, state: TrainingState, before: Figures | None, product: str
) -> None:
    run = parts.run
    out = run.path / product
    save_draft(draft, parts.store.tokenizer_source, out, parts.stored_dtype)
    after = None
    if parts.evaluator is not None:
        parts.progress("evaluating", 0, 1)
        saved = load_model(out, dtype="float32", device=str(parts.accelerator.device))
        after = parts.evaluator.evaluate(saved)
        parts.progress("evaluating", 1, 1)
    rows = [row for row in read_jsonl(run.metrics) if "loss" in row]
    run.write_result(
        {
            product: str(out),
            "num_steps": state.step,
            "elapsed_s": round(state.elapsed_s, 3),
            "num_tokens": sum(row["num_tokens"] for row in rows),
            "final_loss": rows[-1]["loss"],
            "before": before,
            "after": after,
        }
    )
