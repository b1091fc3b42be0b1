"""Export a model for an engine: adapt, write, read back, describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.config import StrictModel
from paceline.data.input_checks import checked
from paceline.export.card import Launch, model_card, plan_launch
from paceline.export.directory import (
    Checks,
    check_directory,
    check_gguf,
    copy_licence,
    fit,
    reference_of,
    write_directory,
)
from paceline.export.export_inputs import Inputs, manifest_of, read_inputs
from paceline.export.gguf_file import write_gguf
from paceline.models.hf.draft_vocabulary import EXPORTED
from paceline.progress import Progress, silent
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.export.export_inputs import ExportConfig

_SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}


class Exported(StrictModel):
    """Result of an export.

    Attributes:
        path: Directory or GGUF file that the engine loads.
        command: Command that serves it; None for a target exported alone.
        num_speculative_tokens: Tokens drafted per block in that command.
        checks: Comparison with the original model.
        notes: Warnings for the user.
    """

    path: Path
    command: str | None
    num_speculative_tokens: int | None
    checks: Checks
    notes: list[str]


def export(config: ExportConfig, progress: Progress = silent) -> Exported:
    """Export a draft or a target, and compare the export with the original model.

    Raises:
        UsageError: An input cannot be read, the inputs do not match, or `out` exists.
        ExportError: The export differs from the model; it is not kept.
        StorageError: The export cannot be written; `out` is unchanged.
    """
    checked(config)
    inputs = read_inputs(config)
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
    return Exported(
        path=path,
        command=None if launch is None else launch.command,
        num_speculative_tokens=None if launch is None else launch.gamma,
        checks=checks,
        notes=notes,
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
        write_directory(inputs, None if launch is None else launch.gamma, folder)
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
    """Round the weights to the stored dtype, in place."""
    for weight in cast("Any", inputs.model.hf).parameters():
        weight.data = weight.data.to(inputs.stored).float()


def notes_of(inputs: Inputs, launch: Launch | None) -> Iterator[str]:
    config, target = inputs.config, inputs.target
    if target is None:
        yield "no target is given: the model is exported alone, for serving or as a target"
    elif config.target is None:
        yield (
            f"the target {target.path} is the one in {manifest_of(config.model)}; give --target to "
            "choose it"
        )
    if launch is not None and not launch.measured and config.num_speculative_tokens is None:
        yield (
            f"gamma {launch.gamma} is the default, not measured; give the output of paceline "
            "measure --json as --measurement"
        )
    if inputs.measurement is not None and not inputs.measurement.verdict.go:
        verdict = inputs.measurement.verdict
        yield f"the measurement says {verdict}{verdict.next and f'; next: {verdict.next}'}"
    if launch is not None and not config.kind.loads(inputs.served_target):
        kind = "a GGUF file" if config.kind.loads_gguf else "a directory"
        yield f"{config.to} needs the target as {kind}: export it too, and name it as served_target"
    mask = inputs.model.mask_token
    if mask is not None and not config.kind.drafts_at_once:
        yield (
            f"the draft proposes a block in one pass, and {config.to} has no parallel drafting: it "
            "drafts token by token; measure that with --set parallel=false"
        )
    elif mask is not None and launch is not None:
        yield (
            f"for TensorRT-LLM: PARDDecodingConfig(max_draft_len={launch.gamma}, "
            f"speculative_model={str(config.out)!r}, mask_token_id={mask})"
        )
    limit = inputs.model.draft_vocabulary
    if limit is not None and config.draft_vocabulary == "keep":
        yield (
            f"{config.to} drafts from all {inputs.model.vocab_size:,} tokens, also from those "
            f"outside the draft vocabulary of {len(limit):,}, so acceptance may be lower than "
            "measured; --set draft_vocabulary=bake keeps greedy drafts within it"
        )
    if inputs.licence is None:
        yield "the model states no licence; look it up before you publish the export"
