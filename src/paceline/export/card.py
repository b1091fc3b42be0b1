"""Model card of an export: origin, training, measurements, and how an engine serves it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from paceline.config import dump_yaml
from paceline.core.sampling import proposal_params
from paceline.engines.kinds import Drafting
from paceline.errors import UsageError
from paceline.measure.drafts import fastest
from paceline.measure.results import ACCEPTANCE, gamma_of
from paceline.results.figures import FIGURES
from paceline.results.row import select

if TYPE_CHECKING:
    from paceline.core.sampling import SamplingParams
    from paceline.engines.kinds import DraftSampling, EngineKind
    from paceline.export.checks import Checks
    from paceline.export.export_inputs import ExportConfig, Sources
    from paceline.measure import Measurement
    from paceline.results.row import Row

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = (".txt", ".json", ".jsonl", ".parquet", ".gz")
_DIGITS = 4  # of figures in the header


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
        "library_name": "gguf" if sources.config.kind.loads_gguf else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["paceline"] + (["speculative-decoding"] if sources.target else []),
    }
    if sources.licence is not None:
        values["license"] = sources.licence
    base = sources.config.base_model or sources.tokenizer_source
    if sources.config.base_model or _is_on_hub(base):
        values["base_model"] = base
        if sources.target is not None:
            # the hub has no word for a draft, and would take a GGUF file for a quantized target
            values["base_model_relation"] = "finetune"
        elif sources.config.dtype == "q8_0":
            values["base_model_relation"] = "quantized"
    if sources.run is not None and "data.train" not in sources.run.get("inputs", {}):
        data = sources.run["config"]["data"]["train"]["path"]
        if _names_data_set(data):  # local files have a fingerprint
            values["datasets"] = [data]
    if sources.measurement is not None:
        values["model-index"] = _model_index(sources.config.out.name, sources.measurement)
    return f"---\n{dump_yaml(values)}---"


def _is_on_hub(path: str) -> bool:
    """True for the name of a model on the hub, if it was read."""
    return not Path(path).expanduser().exists()


def _names_data_set(path: str) -> bool:
    """True for what may be the name of a data set on the hub."""
    is_name = bool(_NAME.fullmatch(path)) and Path(path).suffix not in _FILES
    return is_name and _is_on_hub(path)


def _model_index(name: str, measurement: Measurement) -> list[dict[str, Any]]:
    """The figures of the measurement as evaluation results of the hub."""
    prompts, requests = measurement.config.prompts, measurement.requests
    kind = prompts.path if _names_data_set(prompts.path) else "prompts"
    rows = [(name, measurement.texts) for name in ACCEPTANCE]
    rows += [("block_efficiency", row) for row in _blocks(measurement)]
    if requests is not None:
        rows.append(("speedup", requests))
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=kind,
            dataset_name=Path(prompts.path).name,
            dataset_config=prompts.subset,
            dataset_split=prompts.split,
            metric_type=figure,
            metric_name=FIGURES[figure].words + _at_gamma(row),
            metric_value=round(FIGURES[figure].value(row), _DIGITS),
        )
        for figure, row in rows
    ]
    return eval_results_to_model_index(name, results)


def _blocks(measurement: Measurement) -> list[Row]:
    """The scored texts with blocks of the gamma to serve; none without GO."""
    return select(measurement.blocks, gamma=measurement.best_gamma)


def _at_gamma(row: Row) -> str:
    return f", gamma {gamma_of(row)}" if "gamma" in row.setting else ""


def _model(sources: Sources) -> str:
    model, target = sources.model, sources.target
    config = model.hf.config.get_text_config(decoder=True)
    lines = [
        f"- architecture: {_code(model.hf.config.model_type)}, {config.num_hidden_layers} layers, "
        f"hidden size {config.hidden_size}, {model.num_parameters:,} parameters",
        f"- exported from: {_code(sources.config.model)}",
    ]
    if target is not None:
        whole = target.facts.num_parameters
        share = f" ({model.num_parameters / whole:.1%} of its parameters)" if whole else ""
        lines.append(f"- target: {_code(target.path)}{share}")
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
    config, requests = measurement.config, measurement.requests
    rows = [(FIGURES[name].words, str(measurement.figure(name))) for name in ACCEPTANCE]
    for row in _blocks(measurement):
        tau = FIGURES["block_efficiency"].value(row)
        rows.append((f"tokens per target call, gamma {gamma_of(row)}", f"{tau:.3f}"))
    if requests is not None:
        speedup = str(measurement.figure("speedup", requests))
        rows.append((f"speedup in Paceline, gamma {gamma_of(requests)}", speedup))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    processor = measurement.environment.get("processor", "an unknown processor")
    return (
        f"## Measured\n\n{len(measurement.texts.units)} prompts of {_code(config.prompts.path)}, "
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


def plan_launch(sources: Sources, draft: Path) -> Launch | None:
    """Return the launch of the draft at path `draft`; None without a target.

    Raises UsageError if the measurement is for another draft sampling or engine.
    """
    config, target = sources.config, sources.target
    if target is None:
        return None
    config.kind.check_draft_path(str(draft))
    drafting = drafting_of(config, sources.measurement)
    gamma, measured = _gamma(config, sources.measurement)
    served = config.served_target or target.path
    if not config.kind.loads(served):
        served = "TARGET"  # a note says how to create it
    if config.kind.code is not None:
        encodes = sources.model.decoder_prompt is not None
        kind = "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"
        command = config.kind.code(served, str(draft), gamma, kind)
    else:
        command = _command(config.kind, served, str(draft), gamma, drafting)
    return Launch(command, gamma, _WORDS[drafting], measured)


def _command(engine: EngineKind, target: str, draft: str, gamma: int, drafting: str) -> str:
    sampling = "probabilistic" if drafting == "probabilistic" else "greedy"
    arguments = engine.draft_arguments(Drafting(draft, gamma, sampling))
    return shlex.join([*engine.program, *engine.target_arguments(target), *arguments])


def drafting_of(config: ExportConfig, measurement: Measurement | None) -> str:
    """Return `greedy`, `probabilistic` (temperature only, no top-k or top-p) or `as_requested`."""
    if config.kind.processes_twice:
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
    if measurement is None or not measurement.verdict.timed:
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
