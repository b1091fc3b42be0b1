"""Model card of an export: origin, training, measurements, and how an engine serves it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from paceline.core.sampling import proposal_params
from paceline.engines.contract import Drafting
from paceline.errors import UsageError
from paceline.measure.measurement import fastest
from paceline.measure.results import ACCEPTANCE, gamma_of
from paceline.models.hf.architectures import num_decoder_layers, num_encoder_layers
from paceline.results.figures import FIGURES
from paceline.results.row import select

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.contract import DraftSampling
    from paceline.export.directory import Checks
    from paceline.export.export_inputs import ExportConfig, Inputs
    from paceline.measure import Measurement

_CARD = """\
---
{{ card_data }}
---

# {{ "Draft model for speculative decoding" if launch else "Target model" }}: {{ name }}

{% for line in model %}- {{ line }}
{% endfor %}
{%- if training %}
## Training

Aligned with the target by `paceline align`:

{{ training }}
{% endif %}
## Measured

{{ measured }}
{% if launch %}
## Serve it with {{ engine }}

```
{{ launch.command }}
```

{{ launch.gamma }} tokens per block ({{ "the best in the measurement" if launch.measured else
"not measured" }}); the engine drafts {{ launch.drafting }}.
{% endif %}
## Checked

The export was read back and compared with the original model: over {{ checks.num_positions }}
positions, logits differ by at most {{ "%.1e" % checks.largest_difference }} of the largest logit,
the most likely token is the same in {{ "%.1f" % (100 * checks.agreement) }}%, and texts are
tokenized identically.
{%- if checks.stored %} Run in {{ checks.stored }}, its logits are finite,
and the most likely token is that of the original in float32 in
{{ "%.1f" % (100 * checks.stored_agreement) }}%.
{%- endif %}
{% if notes %}
## Notes

{% for note in notes %}- {{ note }}
{% endfor %}
{%- endif %}"""


def model_card(
    inputs: Inputs, launch: Launch | None, checks: Checks, notes: list[str]
) -> ModelCard:
    """Return the card with the header that the hub reads."""
    return ModelCard.from_template(
        _header(inputs),
        template_str=_CARD,
        name=inputs.config.out.name,
        model=_model(inputs),
        training=_training(inputs.run),
        measured=_measured(inputs.measurement),
        engine=inputs.config.to,
        launch=launch,
        checks=checks,
        notes=[_plain(note) for note in notes],
    )


def _header(inputs: Inputs) -> ModelCardData:
    config = inputs.config
    base = config.base_model or (inputs.source if _is_on_hub(inputs.source) else None)
    relation = None
    if base is not None and inputs.target is not None:
        # the hub has no word for a draft, and would take a GGUF file for a quantized target
        relation = "finetune"
    elif base is not None and config.dtype == "q8_0":
        relation = "quantized"
    return ModelCardData(
        library_name="gguf" if config.kind.loads_gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["paceline"] + (["speculative-decoding"] if inputs.target else []),
        license=inputs.licence,
        base_model=base,
        base_model_relation=relation,
    )


def _is_on_hub(path: str) -> bool:
    """True for the name of a model on the hub, if it was read."""
    return not Path(path).expanduser().exists()


def _model(inputs: Inputs) -> list[str]:
    model, target = inputs.model, inputs.target
    config = model.hf.config.get_text_config(decoder=True)
    layers = f"{num_decoder_layers(model.hf.config)} layers"
    if count := num_encoder_layers(model.hf.config):
        layers = f"{count} encoder and {layers.replace(' ', ' decoder ')}"
    lines = [
        f"architecture: {_code(model.hf.config.model_type)}, {layers}, "
        f"hidden size {config.hidden_size}, {model.num_parameters:,} parameters",
        f"exported from: {_code(inputs.config.model)}",
    ]
    if target is not None:
        whole = target.num_parameters
        share = f" ({model.num_parameters / whole:.1%} of its parameters)" if whole else ""
        lines.append(f"target: {_code(target.path)}{share}")
        lines.append("tokenizer: the target's, its files copied unchanged")
    if (limit := model.draft_vocabulary) is not None:
        lines.append(f"draft vocabulary: {len(limit):,} of {model.vocab_size:,} tokens")
    unknown = "not stated by the target; look it up before you publish this"
    licence = unknown if inputs.licence is None else _code(inputs.licence)
    return [*lines, f"licence: {licence}"]


def _training(run: dict[str, Any] | None) -> str:
    """The configuration of the run as a block of code: it may hold Markdown or HTML."""
    return "" if run is None else textwrap.indent(json.dumps(run["config"], indent=2), "    ")


def _measured(measurement: Measurement | None) -> str:
    if measurement is None:
        return "No measurement was given for this export."
    config, requests = measurement.config, measurement.requests
    rows = [(FIGURES[name].words, str(measurement.figure(name))) for name in ACCEPTANCE]
    for row in select(measurement.blocks, gamma=measurement.best_gamma):  # none without GO
        tau = FIGURES["block_efficiency"].value(row)
        rows.append((f"tokens per target call, gamma {gamma_of(row)}", f"{tau:.3f}"))
    if requests is not None:
        speedup = str(measurement.figure("speedup", requests))
        rows.append((f"speedup in Paceline, gamma {gamma_of(requests)}", speedup))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    processor = measurement.environment.get("processor", "an unknown processor")
    return (
        f"{len(measurement.texts.units)} prompts of {_code(config.prompts.path)}, "
        f"temperature {config.sampling.temperature:g}, on {_code(processor)}. "
        "Brackets: 95% intervals.\n\n"
        f"| metric | value |\n|---|---|\n{table}\n\n{_plain(measurement.verdict)}"
    )


def _code(value: Any) -> str:
    """A value from a file as code on one line: it may hold Markdown or HTML."""
    return f"`{_line(value).replace('`', chr(39))}`"


def _plain(text: Any) -> str:
    """A sentence with values in it, on one line and without HTML, links or code."""
    return re.sub(r"([\\`<\[])", r"\\\1", _line(text))


def _line(value: Any) -> str:
    return " ".join(str(value).split())


DEFAULT_GAMMA = 3


class Launch(NamedTuple):
    """How to serve an export.

    Attributes:
        command: Shell command, or Python code for transformers.
        gamma: Tokens drafted per block.
        drafting: How the engine samples drafts, in words.
        measured: True if gamma comes from a measurement with this draft sampling.
    """

    command: str
    gamma: int
    drafting: str
    measured: bool


def plan_launch(inputs: Inputs, draft: Path) -> Launch | None:
    """Return the launch of the draft at path `draft`; None without a target.

    Raises UsageError if the measurement is for another draft sampling or engine.
    """
    config = inputs.config
    if inputs.target is None:
        return None
    drafting = drafting_of(config, inputs.measurement)
    gamma, measured = _gamma(config, inputs.measurement)
    served = inputs.served_target
    if not config.kind.loads(served):
        served = "TARGET"  # a note says how to create it
    encodes = inputs.model.decoder_prompt is not None
    model_class = "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"
    sampling = "probabilistic" if drafting == "probabilistic" else "greedy"
    at_once = config.kind.drafts_at_once and inputs.model.mask_token is not None
    found = inputs.measurement
    others = found is not None and found.config.parallel != at_once
    if others and inputs.model.mask_token is not None:
        raise UsageError(
            f"{config.measurement} was measured with parallel={not at_once}, and {config.to} "
            f"drafts otherwise; measure again with --set parallel={str(at_once).lower()}"
        )
    drafted = Drafting(str(draft), gamma, sampling, parallel=at_once)
    command = config.kind.launch(served, drafted, model_class)
    return Launch(command, gamma, _WORDS[drafting], measured)


def drafting_of(config: ExportConfig, measurement: Measurement | None) -> str:
    """Return `greedy`, `probabilistic` (temperature only, no top-k or top-p) or `as_requested`."""
    if config.kind.in_process:
        wanted = "as_requested"
    elif config.kind.samples_drafts and config.draft_sample_method != "auto":
        wanted = config.draft_sample_method
    elif config.kind.samples_drafts and measurement is not None:
        wanted = "greedy" if _proposals(measurement).greedy else "probabilistic"
    else:
        wanted = "greedy"
    if measurement is not None:
        engine = measurement.engine
        if engine and not engine.startswith(config.to):
            raise UsageError(
                f"{config.measurement} used the costs of {engine}; measure again with the costs of "
                f"{config.to}, or without --costs"
            )
        _check_drafting(config, measurement, wanted)
    return wanted


def _proposals(measurement: Measurement) -> SamplingParams:
    return proposal_params(measurement.config.sampling, measurement.config.draft_sampling)


def _check_drafting(config: ExportConfig, measurement: Measurement, wanted: str) -> None:
    """Raise if the draft sampling differs from the engine's; the best gamma depends on it."""
    sampling, proposals = measurement.config.sampling, _proposals(measurement)
    drawn: DraftSampling = "greedy" if wanted == "greedy" else "probabilistic"
    served = config.kind.proposals(drawn, sampling)
    same = (proposals.greedy and served.greedy) or proposals == served.model_copy(
        update={"repetition_penalty": proposals.repetition_penalty}
    )
    if not same:
        raise UsageError(
            f"{config.measurement} was measured with another draft sampling; {config.to} drafts "
            f"{_WORDS[wanted]}: measure again and add --draft-temperature {served.temperature:g}"
        )


def _gamma(config: ExportConfig, measurement: Measurement | None) -> tuple[int, bool]:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens, False
    if measurement is None:
        return DEFAULT_GAMMA, False
    if measurement.best_gamma:
        return measurement.best_gamma, True
    # without GO, as the card says; the command still has the measured gamma
    return gamma_of(fastest(measurement)), True


_WORDS = {
    "greedy": "greedily, at every temperature",
    "probabilistic": "at the request's temperature, without top-k and top-p",
    "as_requested": "at the square of the request's temperature",
}
