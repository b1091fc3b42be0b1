"""The plugin that puts a rule into vLLM; vLLM calls `register` once in each of its processes.

    PACELINE_RULE='{"rule": "token_v3", "alpha": 0.3}' vllm serve TARGET --speculative-config ...

`PACELINE_RULE` is a rule as JSON or YAML, or a file with one, such as decoding.yaml of `paceline
tune`. Without it, vLLM is not changed. The functions that sample are replaced in both model
runners, and those that overwrite logits which a rule reads; all of them only if their parameters
are those that Paceline was tested with.
"""

# N drafted tokens, or rows of logits; B requests
from __future__ import annotations

import importlib
import inspect
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from paceline.config import describe, parse_yaml
from paceline.core.sampling import SamplingParams
from paceline.engines.commands import RULE_IS_SET
from paceline.engines.kinds import RULE_VARIABLE as VARIABLE
from paceline.engines.vllm_rules import rejection_sample_v1, rejection_sample_v2
from paceline.errors import ConfigError
from paceline.extensions import RuleChoice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.core.rule_base import Rule


_V1 = "vllm.v1.sample.rejection_sampler"
_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_DRAFTER = "vllm.v1.spec_decode.llm_base_proposer"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
_STATES = "vllm.v1.worker.gpu.sample.states"
_PARAMETERS = {
    (_V1, "rejection_sample"): (
        *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
        *("draft_probs", "target_logits", "bonus_token_ids", "sampling_metadata"),
        *("synthetic_mode", "synthetic_conditional_rates", "use_fp64_gumbel"),
    ),
    (_V1, "apply_sampling_constraints"): ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    (_DRAFTER, "compute_probs_and_sample_next_token"): (
        *("logits", "sampling_metadata", "use_fp64_gumbel"),
    ),
    (_V2, "rejection_sample"): (
        *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos"),
        *("idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed"),
        *("num_speculative_steps", "synthetic_conditional_rates", "use_fp64"),
        *("use_block_verification", "contexts", "watermarking", "watermarking_skip_mask"),
        "watermark_key",
    ),
    (_SAMPLER, "Sampler.apply_sampling_params"): (
        *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos"),
        *("input_ids", "expanded_local_pos", "seq_lens_upper_bound_np", "skip_top_k_top_p"),
    ),
    (_STATES, "SamplingStates.apply_temperature"): (
        *("self", "logits", "expanded_idx_mapping", "idx_mapping_np"),
    ),
}
_USED_V1, _USED_V2 = 8, 11  # parameters of `rejection_sample`, the first ones, that a rule needs
_NEEDS_DRAFT = (
    "paceline: the rule {} needs the draft's probabilities, and vLLM drafts greedily; set "
    '"draft_sample_method": "probabilistic" in --speculative-config'
)
_MOST_WITHOUT_DRAFT = 20  # sampled batches, before the first with probabilities
_log = logging.getLogger("vllm.paceline")


class Counter:
    """Calls of the rule in this process; the first is logged, and every thousandth.

    Attributes:
        num_calls: Number of batches with drafts.
        num_without_draft: Batches without draft probabilities, whose sampled requests follow the
            target.
        saw_draft: vLLM samples drafts, so that those without probabilities are not greedy ones.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_without_draft = 0
        self.saw_draft = False

    def add(self, rule: Rule, runner: str) -> None:
        """Count a call."""
        self.num_calls += 1
        if self.num_calls == 1 or self.num_calls % 1000 == 0:
            _log.info("paceline: %r judged %d batches (%s)", rule, self.num_calls, runner)


counter = Counter()


def register() -> None:
    """Replace vLLM's rejection sampling by the rule in `PACELINE_RULE`, if it is set.

    Raises:
        SystemExit: The rule cannot be read, or this vLLM is not supported; with one line.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return
    rule = read_rule(given)
    if any(getattr(found, "paceline_rule", None) for *_, found in _originals()):
        return  # vLLM may load plugins twice
    for place, name, replacement in replacements(rule):
        replacement.paceline_rule = rule
        setattr(place, name, replacement)
    module = _module(_V1)
    if hasattr(module, "expand_batch_to_tokens") and not torch.cuda.is_available():
        # on a CPU vLLM 0.32.0 leaves the result uninitialised (vLLM issue 55005)
        module.expand_batch_to_tokens = expand_batch_to_tokens
    _log.info("%s %r", RULE_IS_SET, rule)


def replacements(rule: Rule) -> list[tuple[Any, str, Any]]:
    """Modules and classes of vLLM, the names of their functions, and those that replace them.

    Raises:
        SystemExit: This vLLM is not supported; with one line.
    """
    originals = _originals()
    for (module, path), (*_, original) in zip(_PARAMETERS, originals, strict=True):
        found = () if original is None else tuple(inspect.signature(original).parameters)
        if found != _PARAMETERS[module, path]:
            raise SystemExit(
                f"paceline: {module}.{path} of this vLLM takes "
                f"{', '.join(found) or 'nothing'}, which Paceline does not know (tested: vLLM "
                f"0.32.0); unset {VARIABLE} or install a tested version"
            )
    first, second = RawLogits(rule), RawLogits(rule)
    _, constraints, sample_drafts, _, params, temperature = (one for *_, one in originals)
    made = (
        *(_sampler_v1(rule, first), first.constraints(constraints), _drafter(sample_drafts)),
        *(_sampler_v2(rule, second), second.params(params), second.temperature(temperature)),
    )
    return [(place, name, new) for (place, name, _), new in zip(originals, made, strict=True)]


def _originals() -> list[tuple[Any, str, Any]]:
    """Module or class, name and function of all of `_PARAMETERS`; None for one that is missing."""
    found: list[tuple[Any, str, Any]] = []
    for module, path in _PARAMETERS:
        place, (*classes, name) = _module(module), path.split(".")
        for part in classes:
            place = getattr(place, part, None)
        found.append((place, name, getattr(place, name, None)))
    return found


def read_rule(given: str) -> Rule:
    """A rule from JSON or YAML text, or from a file with it.

    Raises:
        SystemExit: It cannot be read; with one line.
    """
    where, text = VARIABLE, given
    if not given.startswith("{"):
        where = given
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(
                f"paceline: {VARIABLE} names {given}, which cannot be read ({error}); give a rule "
                'such as {"rule": "token_v3", "alpha": 0.3}, or a file with one'
            ) from None
    try:
        values = parse_yaml(text, where)
        for key in ("strategy", "rule"):  # of a decoding.yaml
            if isinstance(values, dict) and isinstance(values.get(key), dict):
                values = values[key]
        return TypeAdapter(RuleChoice).validate_python(values)
    except (ConfigError, ValidationError) as error:
        reason = describe(error) if isinstance(error, ValidationError) else str(error)
        raise SystemExit(
            f"paceline: {where} is not a rule ({reason}); give one such as "
            '{"rule": "token_v3", "alpha": 0.3}'
        ) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"paceline: this vLLM has no {name} ({error}); unset {VARIABLE} or install vLLM 0.32.0"
        ) from None


def _drafter(original: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """The first runner's drafting, with untempered log-probabilities in place of probabilities.

    vLLM only stores and regroups them. float32 probabilities are 0 for tokens that count at
    temperature 1, where the temperature is below 0.2.
    """

    def compute_probs_and_sample_next_token(
        logits: Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False
    ) -> tuple[Tensor, Tensor]:
        if sampling_metadata.all_greedy:
            return original(logits, sampling_metadata, use_fp64_gumbel)
        counter.saw_draft = True
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        tokens, _ = original(log_probs.clone(), sampling_metadata, use_fp64_gumbel)
        return tokens, log_probs

    return compute_probs_and_sample_next_token


def _sampler_v1(rule: Rule, raw: RawLogits) -> Any:
    names = _PARAMETERS[_V1, "rejection_sample"]

    def rejection_sample(*arguments: Any, **named: Any) -> Tensor:
        given = dict(zip(names, arguments, strict=False)) | named
        _refuse(synthetic=given.get("synthetic_mode", False))
        lost = False
        if sum(given["num_draft_tokens"]):
            if given["draft_probs"] is not None:
                counter.saw_draft = True
            elif not given["sampling_metadata"].all_greedy:
                lost = _lost_draft(rule)
            counter.add(rule, "first runner")
        used = [given[name] for name in names[:_USED_V1]]
        raw_logits = raw.take(given["target_logits"])
        return rejection_sample_v1(rule, *used, raw_logits=raw_logits, lost_draft=lost)

    return rejection_sample


def _sampler_v2(rule: Rule, raw: RawLogits) -> Any:
    names = _PARAMETERS[_V2, "rejection_sample"]

    def rejection_sample(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, arguments, strict=False)) | named
        _refuse(
            synthetic=given.get("synthetic_conditional_rates") is not None,
            block=given.get("use_block_verification", False),
            watermark=given.get("contexts") is not None,
        )
        is_greedy = given["draft_logits"] is None
        if is_greedy and rule.uses_confidence and bool((given["temperature"] > 0).any()):
            raise RuntimeError(_NEEDS_DRAFT.format(rule.name))
        counter.add(rule, "second runner")
        used = [given[name] for name in names[:_USED_V2] if name != "idx_mapping"]
        return rejection_sample_v2(rule, *used, raw_logits=raw.take(given["target_logits"]))

    return rejection_sample


def _refuse(*, synthetic: bool = False, block: bool = False, watermark: bool = False) -> None:
    settings = {
        "rejection_sample_method synthetic": synthetic,
        "rejection_sample_method block": block,
        "a watermark": watermark,
    }
    for name, is_set in settings.items():
        if is_set:
            raise RuntimeError(
                f"paceline: {name} decides which drafts are kept, and so does {VARIABLE}; unset one"
            )


def _lost_draft(rule: Rule) -> bool:
    """Whether the first runner has lost the probabilities of a batch's drafts, or never had any.

    It loses them for single batches, where a request's drafts are older than its last step or were
    made in a greedy batch. If it drafts greedily, q is one-hot, and rules that compare no
    confidences judge by that.

    Raises:
        RuntimeError: It has handed over none in many batches, so it drafts greedily, and the rule
            compares confidences.
    """
    if not (counter.saw_draft or rule.uses_confidence):
        return False
    counter.num_without_draft += 1
    if not counter.saw_draft and counter.num_without_draft > _MOST_WITHOUT_DRAFT:
        raise RuntimeError(_NEEDS_DRAFT.format(rule.name))
    if counter.num_without_draft == 1:
        _log.warning(
            "paceline: vLLM has no draft probabilities for a batch; its tokens follow the target"
        )
    return True


_GREEDY = SamplingParams(temperature=0)


class RawLogits:
    """The target's raw logits of one runner's batch, which vLLM overwrites, if the rule reads them.

    Raw logits are those before temperature, min-p, top-k and top-p, with what vLLM applies before:
    penalties, `logit_bias`, `bad_words`, `allowed_token_ids` and `min_tokens`. Functions of vLLM
    that shape logits are replaced by ones that copy them at that place. The samplers get the shaped
    logits as the same object, by which the copy is recognized.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._shaped: Tensor | None = None
        self._raw: Tensor | None = None
        self._is_shaping = False

    def take(self, shaped: Tensor) -> Tensor | None:
        """The raw logits of these; None: the rule does not read them, or nothing was shaped.

        Raises:
            RuntimeError: The rule reads them, and another function has shaped these.
        """
        found, raw = self._shaped, self._raw
        self._shaped = self._raw = None
        if found is not shaped and self._reads(any_greedy=True):
            raise RuntimeError(
                f"paceline: the rule {self._rule.name} reads the target's logits before top-k and "
                "top-p, and the sampler of this model does not hand them over; use the rule "
                "lossless, or unset PACELINE_RULE"
            )
        return raw if found is shaped else None

    def constraints(self, original: Callable[..., Tensor]) -> Any:
        """The first runner's `apply_sampling_constraints`, which overwrites the logits."""

        def apply_sampling_constraints(
            logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any
        ) -> Tensor:
            greedy, random = sampling_metadata.all_greedy, sampling_metadata.all_random
            reads = not greedy and self._reads(any_greedy=not random)
            self._raw = logits.clone() if reads else None
            self._shaped = original(logits, cu_num_draft_tokens, sampling_metadata)
            return self._shaped

        return apply_sampling_constraints

    def params(self, original: Callable[..., Tensor]) -> Any:
        """The second runner's `Sampler.apply_sampling_params`."""

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
        """The second runner's `SamplingStates.apply_temperature`: penalties were applied before."""

        def apply_temperature(
            states: Any, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any
        ) -> None:
            if self._is_shaping and self._reads(any_greedy=states.any_greedy(idx_mapping_np)):
                self._raw = logits.clone()
            original(states, logits, expanded_idx_mapping, idx_mapping_np)

        return apply_temperature

    def _reads(self, *, any_greedy: bool) -> bool:
        return self._rule.uses_confidence or (any_greedy and self._rule.reads_raw(_GREEDY))


def expand_batch_to_tokens(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """vLLM's function: a request's value for each of its tokens, [B] -> [num_tokens]."""
    ends = cu_num_tokens.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)
