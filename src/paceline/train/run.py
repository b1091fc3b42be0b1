"""From a configuration to a run directory: what all kinds of training have in common.

Set up, figures before, train, save, figures after of what was saved. A stopped run goes on; a finished
one is left as it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, parse_flag_from_env

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
    from paceline.models.hf.causal import CausalModel
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
    """Train; the model becomes the directory `product` of the run, its figures `result.json`.

    `inputs` gives the fingerprints of what every step hangs on beside the configuration, by name.

    Returns:
        The run directory.

    Raises:
        UsageError: a model, a text or a setting cannot be used.
        TrainingError: training failed or was stopped; checkpoints stay.
        StorageError: something could not be written; checkpoints stay.
    """
    _check_launcher()
    accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision="no")
    progress = progress if accelerator.is_main_process else silent
    run = RunDirectory(config.output)
    found = check_run_directory(run, config, inputs(), resume=resume)
    if _is_finished(run, config):
        return run.path
    with ExitStack() as stack:
        _take(run, accelerator, stack)
        _train(config, set_up, found, accelerator, run, product, progress)
    return run.path


def _take(run: RunDirectory, accelerator: Accelerator, stack: ExitStack) -> None:
    """Nobody else writes the run until the stack ends; what the main process is told, all raise."""
    refusal: list[PacelineError | None] = [None]
    if accelerator.is_main_process:
        try:
            stack.enter_context(run.alone())
        except PacelineError as error:
            refusal = [error]
    broadcast_object_list(refusal)
    if refusal[0] is not None:
        raise refusal[0]


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
        # the result of a smaller budget would pass for this one's if this start is stopped
        run.result.unlink(missing_ok=True)
        if not has_begun(run):
            clear_set_up(run)
        before = run.read_manifest() if has_begun(run) else None
        run.write_manifest(config, inputs=inputs, choices=(before or {}).get("choices", {}))
    progress("loading", 0, 1)
    compiled()  # once a machine, and not in the time of the first step
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
    """Weights are dealt out here, layer by layer and each model apart: nobody else may do so, too."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise ConfigError(
                f"accelerate is set up for {name}, which Paceline does not train with; launch plain "
                "processes (torchrun, or accelerate launch --multi_gpu), and set shard to deal out "
                "weights, gradients and moments as ZeRO-3 does"
            )


def takes_bfloat16(
    config: TrainSettings,
    shapes: Sequence[tuple[int, int]],
    accelerator: Accelerator,
    run: RunDirectory,
) -> bool:
    """Whether passes run in bfloat16; weights and sums stay float32.

    "auto" is measured on products of these shapes when a run begins, and kept in its manifest.
    """
    if config.precision != "auto":
        return config.precision == "bfloat16"
    choice = _keep_choice(
        run,
        "precision",
        lambda: choose_precision("training", shapes, accelerator.device),
        accelerator,
    )
    return choice == "bfloat16"


def writer_of(
    config: TrainSettings, model: CausalModel, accelerator: Accelerator, run: RunDirectory
) -> CausalModel | TrainingWriter:
    """What a model in training writes with: itself, or copies with weights rounded to bfloat16.

    "auto" is measured on the model when a run begins, and kept in its manifest.
    """
    precision: str = config.precision
    if precision == "auto":
        rows = config.batch_size // config.gradient_accumulation_steps
        precision = _keep_choice(run, "writing", lambda: choose_writer(model, rows), accelerator)
    return TrainingWriter(model) if precision == "bfloat16" else model


def _keep_choice(
    run: RunDirectory, name: str, choose: Callable[[], Choice], accelerator: Accelerator
) -> str:
    """The precision that the run keeps under this name; all processes have the main one's."""
    kept: list[str | None] = [None]
    if accelerator.is_main_process:
        kept = [run.keep_choice(name, lambda: choose()._asdict())["precision"]]
    broadcast_object_list(kept)
    assert kept[0] is not None, "the main process chooses"
    return kept[0]


def check_batches(
    config: TrainSettings, num_rows: int, shard: Shard, name: str = "batch_size"
) -> None:
    """Can so many rows of a step be dealt out to all processes and parts?

    Raises:
        ConfigError: they cannot.
    """
    parts = shard.world_size * config.gradient_accumulation_steps
    if num_rows % parts:
        raise ConfigError(
            f"{name} {num_rows} cannot be dealt out to {shard.world_size} processes "
            f"with gradient_accumulation_steps {config.gradient_accumulation_steps}; make it a "
            f"multiple of {parts}"
        )


def _is_finished(run: RunDirectory, config: TrainSettings) -> bool:
    """Whether this run, with this budget, has its result."""
    manifest = run.read_manifest()
    if manifest is None or run.read_result() is None:
        return False
    now = config.model_dump(mode="json")
    return all(manifest["config"][key] == now[key] for key in ("num_steps", "max_seconds"))


def _figures_before(run: RunDirectory, loop: TrainingLoop) -> Figures | None:
    """The untrained model's figures: measured at the start, read when a run goes on."""
    if loop.state.step == 0:
        return loop.evaluate()
    rows = [row for row in read_jsonl(run.metrics) if row["step"] == 0]
    return rows[0]["evaluation"] if rows else None


def _finish(
    parts: Parts, draft: CausalModel, state: TrainingState, before: Figures | None, product: str
) -> None:
    """Save the model, and judge what was saved, not what was in memory."""
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
