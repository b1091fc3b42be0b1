"""Export a model for an engine: adapt, write, read back, describe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import transformers

from paceline.config import StrictModel, as_written
from paceline.data.input_checks import checked
from paceline.errors import ExportError, UsageError
from paceline.export.card import Launch, model_card, plan_launch
from paceline.export.checks import (
    Checks,
    Reference,
    check_directory,
    check_gguf,
    check_in_engine,
    overflows,
)
from paceline.export.directory import (
    copy_licence,
    extends_positions,
    fit,
    write_directory,
)
from paceline.export.export_inputs import Sources, manifest_of, read_sources
from paceline.export.gguf_file import write_gguf
from paceline.models.compatibility import without_rollback
from paceline.models.hf.architectures import num_decoder_layers, num_encoder_layers
from paceline.models.hf.draft_vocabulary import EXPORTED
from paceline.models.inspection import state_keeper
from paceline.progress import Progress, silent
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from paceline.export.export_inputs import ExportConfig

_FEW = 0.9  # positions with the same most likely token in 16 bits; below, a note says so
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
    sources = read_sources(config)
    if config.check_engine:
        _refuse_unservable(sources)
    path = config.out
    if config.kind.loads_gguf:
        path = config.out / f"{config.out.name}-{_SUFFIXES[_gguf_type(sources)]}.gguf"
    launch = plan_launch(sources, path)
    notes = notes_of(sources, launch)
    with atomic_directory(config.out) as scratch:
        checks = _write(sources, launch, scratch, path.name, notes)
        copy_licence(sources, scratch)
        with as_written(manifest_of(config.model)):
            card = model_card(sources, launch, checks, notes)
        (scratch / "README.md").write_text(card, "utf-8")
        marker = {"engine": config.to, "draft_vocabulary": config.draft_vocabulary}
        (scratch / EXPORTED).write_text(json.dumps(marker) + "\n", "utf-8")
    served = None
    if config.check_engine and launch is not None:
        served = check_in_engine(sources, path, launch.gamma, progress)
    return Exported(
        path=path,
        command=None if launch is None else launch.command,
        num_speculative_tokens=None if launch is None else launch.gamma,
        checks=checks,
        served=served,
        notes=notes,
    )


def _refuse_unservable(sources: Sources) -> None:
    """Raise a UsageError if the engine could not serve the export for the check."""
    config = sources.config
    if sources.target is None:
        raise UsageError(
            "check_engine lets the export draft for its target, and none is given; give --target"
        )
    if sources.model.decoder_prompt is not None:
        raise UsageError(
            f"{config.model} is an encoder-decoder, which {config.to} cannot serve with a draft "
            "through Paceline; leave --check-engine out"
        )
    other = _other_target(sources)
    if other is not None and not config.kind.in_process:  # there Paceline loads any target
        raise UsageError(other)


def _other_target(sources: Sources) -> str | None:
    """How to make the target that the engine needs, if it cannot load this one."""
    config = sources.config
    served = config.served_target or (sources.target.path if sources.target else "")
    if config.kind.loads(served):
        return None
    gguf = config.kind.loads_gguf
    wanted, made = ("a GGUF file", "FILE.gguf") if gguf else ("a directory", "TARGET")
    return (
        f"{config.to} needs the target as {wanted}: run paceline export {shlex.quote(served)} "
        f"--to {config.to} --out TARGET, then add --set served_target={made} here"
    )


def _gguf_type(sources: Sources) -> str:
    if sources.config.dtype != "auto":
        return sources.config.dtype
    return str(sources.stored).removeprefix("torch.")


def _write(
    sources: Sources, launch: Launch | None, folder: Path, name: str, notes: list[str]
) -> Checks:
    """Write the model directory, or a GGUF file with this name, and read it back; adds notes."""
    config, hf = sources.config, cast("Any", sources.model.hf)
    lossless = config.dtype != "q8_0"
    if lossless:  # compare with the weights as stored
        for weight in hf.parameters():
            weight.data = weight.data.to(sources.stored).float()
        _refuse_overflow(sources)
    reference = Reference(sources.model)
    fit(sources)
    baked = config.draft_vocabulary == "bake"
    if not config.kind.loads_gguf:
        write_directory(sources, launch, folder)
        checks = check_directory(folder, reference, sources.stored, baked=baked)
        if (agreement := checks.stored_agreement) is not None and agreement < _FEW:
            notes.append(
                f"run in {checks.stored}, the export has the most likely token of the original "
                f"in float32 in only {agreement:.1%} of the positions; consider --dtype float32"
            )
        return checks
    write_gguf(
        *(sources.model, folder / name),
        stored=_gguf_type(sources),
        tokenizer=sources.tokenizer,
        source=sources.tokenizer_source,
        facts={"name": config.out.name, "license": sources.licence},
    )
    checks = check_gguf(folder / name, reference, exact=lossless, baked=baked)
    if _gguf_type(sources) in ("float16", "q8_0") and overflows(hf, reference):
        notes.append(
            "activations of this model exceed the range of float16, in which llama.cpp computes on "
            "some GPUs; compare its texts there, or export it with --dtype bfloat16"
        )
    return checks


def _refuse_overflow(sources: Sources) -> None:
    for name, weight in cast("Any", sources.model.hf).named_parameters():
        if not weight.isfinite().all():
            stored = str(sources.stored).removeprefix("torch.")
            raise ExportError(
                f"{name} has values beyond the range of {stored}; nothing was kept. Export it with "
                "--dtype bfloat16 or float32"
            )


def notes_of(sources: Sources, launch: Launch | None) -> list[str]:
    """Return the notes for the user."""
    config, target = sources.config, sources.target
    notes: list[str] = []
    if target is None:
        notes.append("no target is given: the model is exported alone, for serving or as a target")
    elif config.target is None:
        notes.append(
            f"the target {target.path} is the one in {manifest_of(config.model)}; give --target to "
            "choose it"
        )
    if launch is not None:
        notes += _launch_notes(sources, launch)
    limit = sources.model.draft_vocabulary
    if limit is not None and config.draft_vocabulary == "keep":
        notes.append(
            f"the draft vocabulary has {len(limit):,} of {sources.model.vocab_size:,} tokens, but "
            f"{config.to} drafts from all of them, including tokens that the draft was not trained "
            "on; --set draft_vocabulary=bake keeps greedy drafts within the draft vocabulary"
        )
    shape = sources.model.hf.config
    # transformers makes a cache of this many layers
    if shape.get_text_config(decoder=True).num_hidden_layers < num_decoder_layers(shape):
        notes.append(
            f"the model has {num_decoder_layers(shape)} decoder layers and "
            f"{num_encoder_layers(shape)} encoder layers, for which generate() of transformers "
            "fails; use at least as many encoder layers as decoder layers"
        )
    if sources.licence is None:
        notes.append("the model states no licence; look it up before you publish the export")
    return notes


def _launch_notes(sources: Sources, launch: Launch) -> list[str]:
    measurement = sources.measurement
    notes: list[str] = []
    if not launch.measured:
        notes.append(
            f"{launch.gamma} tokens per block was not measured; give the JSON of paceline measure "
            "as --measurement"
        )
    if measurement is not None and not measurement.verdict.go:
        notes.append(f"the measurement says {measurement.verdict}")
    notes += _position_notes(sources)
    notes += _state_notes(sources)
    if (note := _other_target(sources)) is not None:
        notes.append(note)
    return notes


def _state_notes(sources: Sources) -> list[str]:
    """What an engine needs if draft or target cannot roll back."""
    name = without_rollback(sources.model)
    if name is None and sources.target is not None:
        name = state_keeper(sources.target.path)
    if name is None:
        return []
    engine = sources.config.to
    if sources.config.kind.refuses_stateful and getattr(sources.model.hf, "_is_stateful", False):
        return [f"{engine} {transformers.__version__} refuses assisted generation with {name}"]
    return [
        f"{name} keeps a state, which {engine} must restore when it rejects drafted tokens, and "
        "not every version can; compare its greedy texts with and without the draft"
    ]


def _position_notes(sources: Sources) -> list[str]:
    have = sources.model.max_length
    wanted = None if sources.target is None else sources.target.facts.max_length
    if have is None or extends_positions(sources) or (wanted is not None and have >= wanted):
        return []
    return [
        f"the draft has {have:,} positions and the target "
        f"{'no limit' if wanted is None else format(wanted, ',')}; {sources.config.to} may fail "
        f"beyond {have:,} tokens, so limit the served context to {have:,}"
    ]
