"""Export a model for an engine: adapt, write, read back, describe."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import transformers

from paceline.config import StrictModel
from paceline.data.input_checks import checked
from paceline.errors import ExportError, UsageError
from paceline.export.card import Launch, model_card, plan_launch
from paceline.export.checks import (
    Checks,
    check_directory,
    check_gguf,
    check_in_engine,
    reference_of,
)
from paceline.export.directory import copy_licence, extends_positions, fit, write_directory
from paceline.export.export_inputs import Inputs, manifest_of, read_inputs
from paceline.export.gguf_file import write_gguf
from paceline.models.compatibility import without_rollback
from paceline.models.hf.draft_vocabulary import EXPORTED
from paceline.models.inspection import state_keeper
from paceline.progress import Progress, silent
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.export.export_inputs import ExportConfig
    from paceline.models.inspection import ModelFacts

_SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}


class Exported(StrictModel):
    """Result of an export.

    Attributes:
        path: Directory or GGUF file that the engine loads.
        command: Command that serves it; None for a target exported alone.
        num_speculative_tokens: Tokens drafted per block in that command.
        checks: Comparison with the original model.
        served: Summary of the check in the engine; None without `check_engine`.
        notes: Warnings for the user.
    """

    path: Path
    command: str | None
    num_speculative_tokens: int | None
    checks: Checks
    served: str | None = None
    notes: list[str]


def export(config: ExportConfig, progress: Progress = silent) -> Exported:
    """Export a draft or a target, and compare the export with the original model.

    The check in the engine runs last: the export is kept if it fails.

    Raises:
        UsageError: An input cannot be read, the inputs do not match, or `out` exists.
        ExportError: The export differs from the model (not kept), or the engine drafts nothing.
        EngineError: The engine does not load the export.
        StorageError: The export cannot be written; `out` is unchanged.
    """
    checked(config)
    inputs = read_inputs(config)
    if config.check_engine:
        _refuse_unservable(inputs)
    path = config.out
    if config.kind.loads_gguf:
        path = config.out / f"{config.out.name}-{_SUFFIXES[_gguf_type(inputs)]}.gguf"
    launch = plan_launch(inputs, path)
    notes = list(notes_of(inputs, launch))
    with atomic_directory(config.out) as scratch:
        checks = _write(inputs, launch, scratch, path.name)
        copy_licence(inputs, scratch)
        card = model_card(inputs, launch, checks, notes)
        card.save(scratch / "README.md")
        marker = {"engine": config.to, "draft_vocabulary": config.draft_vocabulary}
        (scratch / EXPORTED).write_text(json.dumps(marker) + "\n", "utf-8")
    served = None
    if config.check_engine and launch is not None:
        served = check_in_engine(inputs, path, launch.gamma, progress)
    return Exported(
        path=path,
        command=None if launch is None else launch.command,
        num_speculative_tokens=None if launch is None else launch.gamma,
        checks=checks,
        served=served,
        notes=notes,
    )


def _refuse_unservable(inputs: Inputs) -> None:
    """Raise a UsageError if the engine could not serve the export for the check."""
    config = inputs.config
    if inputs.target is None:
        raise UsageError(
            "check_engine lets the export draft for its target, and none is given; give --target"
        )
    if inputs.model.decoder_prompt is not None:
        raise UsageError(
            f"{config.model} is an encoder-decoder, which {config.to} cannot serve with a draft "
            "through Paceline; leave --check-engine out"
        )
    other = _other_target(inputs)
    if other is not None and not config.kind.in_process:  # there Paceline loads any target
        raise UsageError(other)


def _other_target(inputs: Inputs) -> str | None:
    """How to make the target that the engine needs, if it cannot load this one."""
    config, served = inputs.config, inputs.served_target
    if config.kind.loads(served):
        return None
    gguf = config.kind.loads_gguf
    wanted, made = ("a GGUF file", "FILE.gguf") if gguf else ("a directory", "TARGET")
    return (
        f"{config.to} needs the target as {wanted}: run paceline export {shlex.quote(served)} "
        f"--to {config.to} --out TARGET, then add --set served_target={made} here"
    )


def _gguf_type(inputs: Inputs) -> str:
    return inputs.stored_name if inputs.config.dtype == "auto" else inputs.config.dtype


def _write(inputs: Inputs, launch: Launch | None, folder: Path, name: str) -> Checks:
    """Write the model directory, or a GGUF file with this name, and read it back."""
    config = inputs.config
    if config.dtype != "q8_0":  # compare with the weights as stored
        _round(inputs)
    reference = reference_of(inputs.model)
    fit(inputs)
    if not config.kind.loads_gguf:
        write_directory(inputs, launch, folder)
        return check_directory(inputs, reference, folder)
    write_gguf(
        *(inputs.model, folder / name),
        stored=_gguf_type(inputs),
        tokenizer=inputs.tokenizer,
        source=inputs.source,
        facts={"name": config.out.name, "license": inputs.licence},
    )
    return check_gguf(inputs, reference, folder / name)


def _round(inputs: Inputs) -> None:
    """Round the weights to the stored dtype, in place; raises ExportError beyond its range."""
    for name, weight in cast("Any", inputs.model.hf).named_parameters():
        weight.data = weight.data.to(inputs.stored).float()
        if not weight.isfinite().all():
            raise ExportError(
                f"{name} has values beyond the range of {inputs.stored_name}; nothing was kept. "
                "Export it with --dtype bfloat16 or float32"
            )


def notes_of(inputs: Inputs, launch: Launch | None) -> Iterator[str]:
    """Return the notes for the user."""
    config, target = inputs.config, inputs.target
    if target is None:
        yield "no target is given: the model is exported alone, for serving or as a target"
    elif config.target is None:
        yield (
            f"the target {target.path} is the one in {manifest_of(config.model)}; give --target to "
            "choose it"
        )
    if launch is not None:
        yield from _launch_notes(inputs, launch)
    limit = inputs.model.draft_vocabulary
    if limit is not None and config.draft_vocabulary == "keep":
        yield (
            f"the draft vocabulary has {len(limit):,} of {inputs.model.vocab_size:,} tokens, but "
            f"{config.to} drafts from all of them, including tokens that the draft was not trained "
            "on; --set draft_vocabulary=bake keeps greedy drafts within the draft vocabulary"
        )
    if inputs.licence is None:
        yield "the model states no licence; look it up before you publish the export"


def _launch_notes(inputs: Inputs, launch: Launch) -> Iterator[str]:
    config, model, target = inputs.config, inputs.model, cast("ModelFacts", inputs.target)
    if not launch.measured:
        yield (
            f"{launch.gamma} tokens per block was not measured; give the JSON of paceline measure "
            "as --measurement"
        )
    if inputs.measurement is not None and not inputs.measurement.verdict.go:
        yield f"the measurement says {inputs.measurement.verdict}"
    have, wanted = model.max_length, target.max_length or math.inf
    if have is not None and have < wanted and not extends_positions(inputs):
        yield (
            f"the draft has {have:,} positions and the target "
            f"{'no limit' if wanted == math.inf else format(wanted, ',')}; {config.to} may fail "
            f"beyond {have:,} tokens, so limit the served context to {have:,}"
        )
    name = without_rollback(model) or state_keeper(target.path)
    if name and config.kind.in_process and getattr(model.hf, "_is_stateful", False):
        yield f"{config.to} {transformers.__version__} refuses assisted generation with {name}"
    elif name:
        yield (
            f"{name} keeps a state, which {config.to} must restore when it rejects drafted tokens, "
            "and not every version can; compare its greedy texts with and without the draft"
        )
    if (note := _other_target(inputs)) is not None:
        yield note
