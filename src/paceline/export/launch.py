"""Launch command of an engine with an exported draft."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.sampling import proposal_params
from paceline.engines.commands import (
    PROGRAMS,
    Drafting,
    check_draft_path,
    draft_arguments,
    proposals_of,
    target_arguments,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.sampling import SamplingParams
    from paceline.engines.commands import DraftSampling, EngineName, Server
    from paceline.export.export_config import ExportConfig
    from paceline.export.export_inputs import Sources
    from paceline.measure import Measurement

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
    check_draft_path(config.to, str(draft))
    drafting = drafting_of(config, sources.measurement)
    gamma, measured = _gamma(config, sources.measurement)
    served = config.served_target or target.path
    if not loads(config.to, served):
        served = "TARGET"  # a note says how to create it
    if config.to == "transformers":
        encodes = sources.model.decoder_prompt is not None
        kind = "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"
        command = _transformers(served, str(draft), gamma, kind)
    else:
        command = _command(config.to, served, str(draft), gamma, drafting)
    return Launch(command, gamma, _WORDS[drafting], measured)


def loads(engine: EngineName, model: str) -> bool:
    """True if the engine can load the model: a GGUF file for llama.cpp, else no GGUF file."""
    return model.endswith(".gguf") == (engine == "llamacpp")


def _command(engine: Server, target: str, draft: str, gamma: int, drafting: str) -> str:
    sampling = "probabilistic" if drafting == "probabilistic" else "greedy"
    arguments = draft_arguments(engine, Drafting(draft, gamma, sampling))
    return shlex.join([*PROGRAMS[engine], *target_arguments(engine, target), *arguments])


def drafting_of(config: ExportConfig, measurement: Measurement | None) -> str:
    """Return `greedy`, `probabilistic` (temperature only, no top-k or top-p) or `as_requested`."""
    if config.to == "transformers":
        wanted = "as_requested"
    elif config.to == "vllm" and config.draft_sample_method != "auto":
        wanted = config.draft_sample_method
    elif config.to == "vllm" and measurement is not None:
        wanted = "greedy" if _proposals(measurement).greedy else "probabilistic"
    else:
        wanted = "greedy"
    if measurement is not None:
        engine = measurement.cost.engine
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
    served = proposals_of(config.to, drawn, sampling)
    same = (proposals.greedy and served.greedy) or proposals == served.model_copy(
        update={"repetition_penalty": proposals.repetition_penalty}
    )
    if not same:
        advice = {
            "greedy": "add --draft-temperature 0",
            "probabilistic": f"add --draft-temperature {sampling.temperature:g}",
            "as_requested": f"add --draft-temperature {served.temperature:g}",
        }[wanted]
        raise UsageError(
            f"{config.measurement} was measured with another draft sampling; {config.to} drafts "
            f"{_WORDS[wanted]}: measure again and {advice}"
        )


def _gamma(config: ExportConfig, measurement: Measurement | None) -> tuple[int, bool]:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens, False
    if measurement is None or not measurement.verdict.timed:
        return DEFAULT_GAMMA, False
    if measurement.best_gamma:
        return measurement.best_gamma, True
    # without GO, as the card says; the command still has the measured gamma
    best = max(measurement.gammas, key=lambda row: row.expected_speedup)
    return (measurement.speed.gamma if measurement.speed else best.gamma), True


def _transformers(target: str, draft: str, gamma: int, kind: str) -> str:
    return (
        f"from transformers import {kind}, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
        f"target = {kind}.from_pretrained({target!r})\n"
        f"draft = {kind}.from_pretrained({draft!r})"
        f"  # drafts {gamma} tokens per block\n"
        'inputs = tokenizer("A prompt", return_tensors="pt")\n'
        "texts = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)"
    )


_WORDS = {
    "greedy": "greedily, at every temperature",
    "probabilistic": "at the request's temperature, without top-k and top-p",
    "as_requested": "at the square of the request's temperature",
}
