"""Opens the run directory of a training run: processes, lock, manifest and choices of precision.

A stopped run is resumed; a finished run is not changed.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from paceline.data.input_checks import checked
from paceline.data.sources import PackedText, Shard
from paceline.environment import began, begin
from paceline.errors import ConfigError, PacelineError
from paceline.models.loading import find_device, load_model, model_directory, tokenizer_of
from paceline.models.precision import choose_precision, overridden
from paceline.models.prepare import training_writer
from paceline.native import compiled
from paceline.progress import silent
from paceline.records import RunDirectory
from paceline.train.checkpoint import (
    CheckpointStore,
    check_run_directory,
    clear_set_up,
    has_begun,
    saved_model,
)
from paceline.train.lora import has_adapter
from paceline.train.tracking import check_trackers, start_trackers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paceline.data.prompts import CorpusConfig
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.train.config import TrainSettings


class TrainingRun(NamedTuple):
    """An open run, the same for each kind of training.

    Attributes:
        progress: Called in the main process only.
    """

    config: TrainSettings
    directory: RunDirectory
    accelerator: Accelerator
    progress: Progress = silent

    @property
    def is_main(self) -> bool:
        """True in the main process, which writes the files."""
        return self.accelerator.is_main_process

    @property
    def shard(self) -> Shard:
        return Shard(self.accelerator.process_index, self.accelerator.num_processes)

    def open_checkpoints(self, tokenizer_source: str | Path) -> CheckpointStore:
        """The checkpoints, without incomplete ones; saved models get this model's tokenizer."""
        source = model_directory(tokenizer_source)
        store = CheckpointStore(self.directory.checkpoints, source, self.config.checkpoints.keep)
        if self.is_main:
            store.sweep()
            # of a process that was killed as it saved one
            for name in ("draft", "model", "start", "adapter"):
                for scratch in self.directory.path.glob(f".{name}.*"):
                    shutil.rmtree(scratch, ignore_errors=True)
        return store

    def load_trained(
        self, start: str | Path, store: CheckpointStore, *, again: bool = False
    ) -> HfModel:
        """The model of the latest checkpoint; the initial one without any, or `again`."""
        latest = None if again else store.latest()
        path = start if latest is None else saved_model(latest)
        return load_model(path, dtype="float32", device=str(self.accelerator.device))

    def takes_bfloat16(self) -> bool:
        """True if forward and backward passes run in bfloat16.

        The choice of "auto" is recorded in the manifest when a run begins.
        """
        precision: list[str | None] = [self.config.precision]
        if precision == ["auto"]:
            if self.is_main:
                choose = partial(choose_precision, self.accelerator.device)
                kept = self.directory.keep_choice("precision", lambda: choose()._asdict())
                precision = [kept["precision"]]
            broadcast_object_list(precision)
        return precision == ["bfloat16"]

    def writer_of(self, model: HfModel) -> HfModel:
        """The generator of training text: the model itself, or copies of its weights.

        On a CPU, a Llama-like model is rounded to bfloat16 unless the precision is float32.
        """
        if has_adapter(model):  # which copies of its weights lack
            return model
        precision: str | None = self.config.precision
        if precision == "auto":
            precision = overridden()
        return training_writer(model, bfloat16=precision != "float32")

    def packed_text(self, corpus: CorpusConfig, model: HfModel, path: str, rows: int) -> PackedText:
        """A corpus that is streamed, as packed documents; `path` is the model's, for errors."""
        return PackedText(
            corpus,
            tokenizer_of(model, path),
            sum(self.config.lengths),
            rows,
            eos_token_ids=model.eos_token_ids,
            seed=self.config.seed,
            shard=self.shard,
            marks=self.directory.path / "packing.jsonl",
        )

    def check_batches(
        self, num_rows: int, name: str = "batch_size", *, steps: int | None = None
    ) -> None:
        """Raise ConfigError unless the rows divide into processes and (accumulation) steps."""
        steps = self.config.gradient_accumulation_steps if steps is None else steps
        parts = self.shard.world_size * steps
        if num_rows % parts:
            raise ConfigError(
                f"{name} {num_rows} cannot be split over {self.shard.world_size} processes with "
                f"gradient_accumulation_steps {steps}; use a multiple of {parts}"
            )


@contextmanager
def open_run(
    config: TrainSettings, inputs: Mapping[str, str], *, resume: bool, progress: Progress
) -> Iterator[TrainingRun | None]:
    """Begin or resume the run in `config.output` and lock its directory; None: it is finished.

    `inputs` has the fingerprints of the run's input files, by name.
    """
    check_trackers(config.track)
    # accelerate also takes accelerators without float64, such as those of Apple
    on_cpu = find_device(config.device).type == "cpu"
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no",
        log_with=list(config.track) or None,
        project_dir=config.output,
    )
    progress = progress if accelerator.is_main_process else silent
    directory = RunDirectory(config.output)
    inputs = check_run_directory(directory, config, inputs, resume=resume)
    if _is_finished(directory, config):
        yield None
        return
    checked(config, resume=resume)
    with ExitStack() as stack:
        _lock(directory, accelerator, stack)
        if accelerator.is_main_process:
            _begin(config, inputs, accelerator, directory)
            if config.track:
                path = directory.path.resolve()
                start_trackers(accelerator, path, config.model_dump(mode="json"))
                stack.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        progress("loading", 0, 1)
        compiled()  # compiles native code now instead of during the first step
        yield TrainingRun(config, directory, accelerator, progress)


def _is_finished(run: RunDirectory, config: TrainSettings) -> bool:
    manifest = run.read_manifest()
    if manifest is None or run.read_result() is None:
        return False
    now = config.model_dump(mode="json")
    return all(manifest["config"][key] == now[key] for key in ("num_steps", "max_seconds"))


def _lock(run: RunDirectory, accelerator: Accelerator, stack: ExitStack) -> None:
    """Lock the run until the stack closes; all have the main process's error, or its beginning."""
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            stack.enter_context(run.alone())
            found = [{"environment": {"began": str(began.get())}}]
        except PacelineError as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], PacelineError):
        raise found[0]
    stack.enter_context(begin(found[0]))


def _begin(
    config: TrainSettings,
    inputs: Mapping[str, str],
    accelerator: Accelerator,
    directory: RunDirectory,
) -> None:
    """Write the manifest, and delete what an earlier start left behind."""
    # if this start is stopped, the result of an earlier, smaller budget must not remain
    directory.result.unlink(missing_ok=True)
    before = None
    if has_begun(directory):
        before = directory.read_manifest()
    else:
        clear_set_up(directory)
    if accelerator.device.type == "cuda":
        torch.cuda.init()  # so that the manifest names the GPU
    choices = (before or {}).get("choices", {})
    directory.write_manifest(config, inputs=dict(inputs), choices=choices)
