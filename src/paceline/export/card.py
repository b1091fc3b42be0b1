"""Model card of an export: origin, training, measurements and launch command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from paceline.export.checks import Checks
    from paceline.export.export_inputs import Sources
    from paceline.export.launch import Launch
    from paceline.measure import Measurement


def model_card(sources: Sources, launch: Launch | None, checks: Checks, notes: list[str]) -> str:
    """Return the card as Markdown with the hub's YAML header."""
    target = sources.target
    kind = "Target model" if target is None else "Draft model for speculative decoding"
    parts = [
        _header(sources),
        f"# {kind}: {sources.config.out.name}",
        _model(sources),
        _training(sources.run),
        _measured(sources.measurement),
        _serving(sources, launch),
        _checked(checks),
    ]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {_plain(note)}" for note in notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(sources: Sources) -> str:
    values: dict[str, Any] = {
        "library_name": "gguf" if sources.config.to == "llamacpp" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["paceline"] + (["speculative-decoding"] if sources.target else []),
    }
    if sources.licence is not None:
        values["license"] = sources.licence
    if sources.target is not None and not Path(sources.target.path).expanduser().exists():
        values["base_model"] = sources.target.path
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _model(sources: Sources) -> str:
    model, target = sources.model, sources.target
    config = model.hf.config.get_text_config(decoder=True)
    lines = [
        f"- architecture: {_code(model.hf.config.model_type)}, {config.num_hidden_layers} layers, "
        f"hidden size {config.hidden_size}, {model.num_parameters:,} parameters",
        f"- exported from: {_code(sources.config.model)}",
    ]
    if target is not None:
        share = f" ({model.num_parameters / target.facts.num_parameters:.1%} of its parameters)"
        lines.append(
            f"- target: {_code(target.path)}{share if target.facts.num_parameters else ''}"
        )
        lines.append("- tokenizer: the target's, its files copied unchanged")
    if model.draft_vocabulary is not None:
        lines.append(
            f"- draft vocabulary: {len(model.draft_vocabulary):,} of {model.vocab_size:,} tokens"
        )
    unknown = "not stated by the target; look it up before you publish this"
    licence = unknown if sources.licence is None else _code(sources.licence)
    return "\n".join([*lines, f"- licence: {licence}"])


def _training(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    config, inputs = run["config"], run.get("inputs", {})
    objective = " + ".join(_code(term["kind"]) for term in config["objective"])
    if config.get("finish"):
        last = " + ".join(_code(term["kind"]) for term in config["finish"]["objective"])
        objective += f", then {last} from {config['finish']['begin']:.0%} of the run on"
    lines = [
        f"- objective: {objective}",
        f"- data: {_code(config['data']['train']['path'])} "
        f"(fingerprint {_code(inputs.get('data.train', 'unknown'))}); "
        f"fixed {config['fixed_fraction']:g}, "
        f"draft-generated {config['draft_fraction']:g}, the rest target-generated",
        f"- optimizer: {_code(config['optimizer']['kind'])}, "
        f"learning rate {config['optimizer']['learning_rate']:g}, "
        f"batch size {config['batch_size']:g}",
        f"- config hash: {_code(run['config_hash'])}, seed {config['seed']:g}",
    ]
    return "## Training\n\nAligned with the target by `paceline align`.\n\n" + "\n".join(lines)


def _measured(measurement: Measurement | None) -> str:
    if measurement is None:
        return "## Measured\n\nNo measurement was given for this export."
    config, acceptance = measurement.config, measurement.acceptance
    rows = [
        ("expected acceptance", str(acceptance.expected_acceptance)),
        ("greedy draft acceptance", str(acceptance.greedy_draft_acceptance)),
        ("greedy agreement", str(acceptance.greedy_agreement)),
    ]
    best = next((row for row in measurement.gammas if row.gamma == measurement.best_gamma), None)
    if best is not None:
        rows.append((f"tokens per target call, gamma {best.gamma}", f"{best.block_efficiency:.3f}"))
    if measurement.speed is not None:
        speed = measurement.speed
        rows.append((f"speedup in Paceline, gamma {speed.gamma}", str(speed.speedup)))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    processor = measurement.environment.get("processor", "an unknown processor")
    return (
        f"## Measured\n\n{acceptance.num_prompts} prompts of {_code(config.prompts.path)}, "
        f"temperature {config.sampling.temperature:g}, on {_code(processor)}. "
        "Brackets: 95% intervals.\n\n"
        f"| metric | value |\n|---|---|\n{table}\n\n{_plain(measurement.verdict)}"
    )


def _serving(sources: Sources, launch: Launch | None) -> str:
    if launch is None:
        return ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", launch.command)), default=0))
    how = "the best in the measurement" if launch.measured else "not measured"
    return (
        f"## Serve it with {sources.config.to}\n\n{fence}\n{launch.command}\n{fence}\n\n"
        f"{launch.gamma} tokens per block ({how}); the engine drafts {launch.drafting}."
    )


def _checked(checks: Checks) -> str:
    again = ""
    if checks.stored is not None:
        again = (
            f" Run in {checks.stored}, its logits are finite, and the most likely token is that of "
            f"the original in float32 in {checks.stored_agreement:.1%}."
        )
    return (
        "## Checked\n\nThe export was read back and compared with the original model: over "
        f"{checks.num_positions} positions, logits differ by at most "
        f"{checks.largest_difference:.1e} of the largest logit, the most likely token is the same "
        f"in {checks.agreement:.1%}, and {checks.num_texts} texts are tokenized identically.{again}"
    )


def _code(value: Any) -> str:
    """A value from a file as code on one line: it may hold Markdown or HTML."""
    return f"`{_line(value).replace('`', chr(39))}`"


def _plain(text: Any) -> str:
    """A sentence with values in it, on one line and without HTML, links or code."""
    return re.sub(r"([\\`<\[])", r"\\\1", _line(text))


def _line(value: Any) -> str:
    return " ".join(str(value).split())
