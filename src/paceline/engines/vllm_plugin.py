"""The plugin that puts a rule into vLLM; vLLM calls `register` once in each of its processes.

    PACELINE_RULE='{"rule": "token_v3", "alpha": 0.3}' vllm serve TARGET --speculative-config ...

`PACELINE_RULE` is a rule as JSON, or a file with one as JSON or YAML, such as decoding.yaml of
`paceline tune`. Without it, vLLM is not changed. vLLM has two model runners; the rule is put into
the second one, its default on GPUs, and the first one ends with one line. Replaced are the function
that keeps drafts, and those that overwrite the logits which a rule reads.
"""

# N drafted tokens, or rows of logits; B requests
from __future__ import annotations

import importlib
import inspect
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from paceline.config import describe, parse_yaml
from paceline.engines import vllm_rules
from paceline.engines.vllm import RULE_IS_SET
from paceline.engines.vllm import RULE_VARIABLE as VARIABLE
from paceline.errors import ConfigError
from paceline.extensions import RuleChoice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.core.rule_base import Rule


_FIRST = "vllm.v1.sample.rejection_sampler"
_JUDGE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
_STATES = "vllm.v1.worker.gpu.sample.states"
_USED = (
    *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos"),
    *("expanded_idx_mapping", "expanded_local_pos", "temperature", "seed"),
    "num_speculative_steps",
)
_UNUSED = ("idx_mapping", "use_fp64", "watermarking", "watermarking_skip_mask", "watermark_key")
_PARAMETERS = {
    (_JUDGE, "rejection_sample"): _USED,
    (_SAMPLER, "Sampler.apply_sampling_params"): ("self", "logits", "skip_top_k_top_p"),
    (_STATES, "SamplingStates.apply_temperature"): (
        *("self", "logits", "expanded_idx_mapping", "idx_mapping_np"),
    ),
}
"""The functions that are replaced, and the parameters that they must have."""
_log = logging.getLogger("vllm.paceline")


def register() -> None:
    """Replace vLLM's rejection sampling by the rule in `PACELINE_RULE`, if it is set."""
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return
    rule = read_rule(given)
    if any(getattr(found, "paceline_rule", None) for *_, found in originals()):
        return  # vLLM may load plugins twice
    for place, name, replacement in replacements(rule):
        replacement.paceline_rule = rule
        setattr(place, name, replacement)
    _module(_FIRST).rejection_sample = _refuse_first_runner
    _log.info("%s %r", RULE_IS_SET, rule)


def replacements(rule: Rule) -> list[tuple[Any, str, Any]]:
    """Modules and classes of vLLM, the names of their functions, and those that replace them."""
    found = originals()
    for ((module, path), needed), (*_, original) in zip(_PARAMETERS.items(), found, strict=True):
        parameters = () if original is None else tuple(inspect.signature(original).parameters)
        if missing := [name for name in needed if name not in parameters]:
            raise SystemExit(
                f"paceline: {module}.{path} of this vLLM takes no {', '.join(missing)}; unset "
                f"{VARIABLE} or install a tested version (vLLM 0.32.0)"
            )
    raw = RawLogits(rule)
    judge, params, temperature = (original for *_, original in found)
    made = _judge(rule, raw, judge), raw.params(params), raw.temperature(temperature)
    return [(place, name, new) for (place, name, _), new in zip(found, made, strict=True)]


def originals() -> list[tuple[Any, str, Any]]:
    """Module or class, name and function of all of `_PARAMETERS`; None for one that is missing."""
    found: list[tuple[Any, str, Any]] = []
    for module, path in _PARAMETERS:
        place, (*classes, name) = _module(module), path.split(".")
        for part in classes:
            place = getattr(place, part, None)
        found.append((place, name, getattr(place, name, None)))
    return found


def read_rule(given: str) -> Rule:
    """A rule from JSON, or from a file with JSON or YAML."""
    where, text = VARIABLE, given
    try:
        if not given.startswith("{"):
            where = given
            text = Path(given).read_text(encoding="utf-8")
        values = parse_yaml(text, where)
        for key in ("strategy", "rule"):  # of a decoding.yaml
            if isinstance(values, dict) and isinstance(values.get(key), dict):
                values = values[key]
        return TypeAdapter(RuleChoice).validate_python(values)
    except (OSError, UnicodeDecodeError, ConfigError, ValidationError) as error:
        reason = describe(error) if isinstance(error, ValidationError) else str(error)
        raise SystemExit(
            f"paceline: {where} is not a rule ({reason}); give one such as "
            '{"rule": "token_v3", "alpha": 0.3}, or a file with one'
        ) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"paceline: this vLLM has no {name} ({error}); unset {VARIABLE} or install vLLM 0.32.0"
        ) from None


def _refuse_first_runner(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "paceline: rules run in vLLM's second model runner, and this is the first "
        "(gpu_model_runner.py); set VLLM_USE_V2_MODEL_RUNNER=1, which needs Triton, or unset "
        f"{VARIABLE}"
    )


def _judge(rule: Rule, raw: RawLogits, original: Callable[..., Any]) -> Any:
    signature = inspect.signature(original)

    def rejection_sample(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*arguments, **named).arguments
        used = [given.pop(name) for name in _USED]
        for name, value in given.items():
            if name not in _UNUSED and value is not signature.parameters[name].default:
                raise RuntimeError(
                    f"paceline: {name} (of rejection_sample_method, or of a watermark) decides "
                    f"which drafts are kept, and so does {VARIABLE}; unset one"
                )
        target_logits, draft_logits, *_, temperature, _, _ = used
        if draft_logits is None and rule.uses_confidence and bool((temperature > 0).any()):
            raise RuntimeError(
                f"paceline: the rule {rule.name} needs the draft's probabilities, and vLLM drafts "
                'greedily; set "draft_sample_method": "probabilistic" in --speculative-config'
            )
        return vllm_rules.rejection_sample(rule, *used, raw_logits=raw.take(target_logits))

    return rejection_sample


class RawLogits:
    """The target's raw logits of a batch, which vLLM overwrites, if the rule reads them.

    Raw logits are those before temperature, min-p, top-k and top-p, with what vLLM applies before:
    penalties, `logit_bias`, `bad_words`, `allowed_token_ids` and `min_tokens`. Functions of vLLM
    that shape logits are replaced by ones that copy them at that place. The sampler gets the shaped
    logits as the same object, by which the copy is recognized.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._shaped: Tensor | None = None
        self._raw: Tensor | None = None
        self._is_shaping = False

    def take(self, shaped: Tensor) -> Tensor | None:
        """The raw logits of these; None: the rule does not read them, or nothing was shaped."""
        found, raw = self._shaped, self._raw
        self._shaped = self._raw = None
        if found is not shaped and self._reads(any_greedy=True):
            raise RuntimeError(
                f"paceline: the rule {self._rule.name} reads the target's logits before top-k and "
                "top-p, and the sampler of this model does not hand them over; use the rule "
                "lossless, or unset PACELINE_RULE"
            )
        return raw if found is shaped else None

    def params(self, original: Callable[..., Tensor]) -> Any:
        """`Sampler.apply_sampling_params`, which overwrites the logits."""

        def apply_sampling_params(
            sampler: Any, logits: Tensor, *arguments: Any, skip_top_k_top_p: bool = False
        ) -> Tensor:
            if skip_top_k_top_p:  # for a step without drafts
                return original(sampler, logits, *arguments, skip_top_k_top_p=True)
            self._raw, self._is_shaping = None, True
            try:
                self._shaped = original(sampler, logits, *arguments)
            finally:
                self._is_shaping = False
            return self._shaped

        return apply_sampling_params

    def temperature(self, original: Callable[..., None]) -> Any:
        """`SamplingStates.apply_temperature`: penalties were applied before."""

        def apply_temperature(
            states: Any, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any
        ) -> None:
            if self._is_shaping and self._reads(any_greedy=states.any_greedy(idx_mapping_np)):
                self._raw = logits.clone()
            original(states, logits, expanded_idx_mapping, idx_mapping_np)

        return apply_temperature

    def _reads(self, *, any_greedy: bool) -> bool:
        return self._rule.uses_confidence or (
            any_greedy and self._rule.reads_raw(vllm_rules.GREEDY)
        )
