"""The plugin that puts a rule into vLLM; vLLM calls `register` once in each of its processes.

    PACELINE_RULE='{"rule": "token_v3", "alpha": 0.3}' vllm serve TARGET --speculative-config ...

`PACELINE_RULE` is a rule as JSON or YAML, or a file with one, such as decoding.yaml of `paceline
tune`. Without it, vLLM is not changed. The functions that sample are replaced in both model
runners, if their parameters are those that Paceline was tested with.
"""

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
from paceline.core.rules import Lossless, RuleChoice
from paceline.engines.commands import RULE_IS_SET
from paceline.engines.commands import RULE_VARIABLE as VARIABLE
from paceline.engines.vllm_rules import rejection_sample_v1, rejection_sample_v2
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.core.rule_base import Rule

_V1 = "vllm.v1.sample.rejection_sampler"
_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_PARAMETERS = {
    _V1: (
        *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
        *("draft_probs", "target_logits", "bonus_token_ids", "sampling_metadata"),
        *("synthetic_mode", "synthetic_conditional_rates", "use_fp64_gumbel"),
    ),
    _V2: (
        *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos"),
        *("idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed"),
        *("num_speculative_steps", "synthetic_conditional_rates", "use_fp64"),
        *("use_block_verification", "contexts", "watermarking", "watermarking_skip_mask"),
        "watermark_key",
    ),
}
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
        num_without_draft: Batches without draft probabilities, judged by the lossless rule.
        saw_draft: vLLM has handed over draft probabilities.
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
    for name, make in ((_V1, _sampler_v1), (_V2, _sampler_v2)):
        module = _module(name)
        original = getattr(module, "rejection_sample", None)
        if getattr(original, "paceline_rule", None) is not None:
            continue  # vLLM may load plugins twice
        found = () if original is None else tuple(inspect.signature(original).parameters)
        if found != _PARAMETERS[name]:
            raise SystemExit(
                f"paceline: {name}.rejection_sample of this vLLM takes "
                f"{', '.join(found) or 'nothing'}, which Paceline does not know (tested: vLLM "
                f"0.32.0); unset {VARIABLE} or install a tested version"
            )
        sampler: Any = make(rule)
        sampler.paceline_rule = rule
        module.rejection_sample = sampler
    module = _module(_V1)
    if hasattr(module, "expand_batch_to_tokens") and not torch.cuda.is_available():
        # on a CPU vLLM 0.32.0 leaves the result uninitialised (vLLM issue 55005)
        module.expand_batch_to_tokens = expand_batch_to_tokens
    _log.info("%s %r", RULE_IS_SET, rule)


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


def _sampler_v1(rule: Rule) -> Callable[..., Tensor]:
    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        del synthetic_conditional_rates, use_fp64_gumbel
        _refuse(synthetic=synthetic_mode)
        judged = rule
        if sum(num_draft_tokens):
            if draft_probs is not None:
                counter.saw_draft = True
            elif rule.uses_confidence and not sampling_metadata.all_greedy:
                judged = _without_draft(rule)
            counter.add(judged, "first runner")
        return rejection_sample_v1(
            judged,
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
        )

    return rejection_sample


def _sampler_v2(rule: Rule) -> Callable[..., tuple[Tensor, Tensor]]:
    def rejection_sample(
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        temperature: Tensor,
        seed: Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False,
        use_block_verification: bool = False,
        contexts: Tensor | None = None,
        watermarking: Tensor | None = None,
        watermarking_skip_mask: Tensor | None = None,
        watermark_key: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        del idx_mapping, use_fp64, watermarking, watermarking_skip_mask, watermark_key
        _refuse(
            synthetic=synthetic_conditional_rates is not None,
            block=use_block_verification,
            watermark=contexts is not None,
        )
        if draft_logits is None and rule.uses_confidence and bool((temperature > 0).any()):
            raise RuntimeError(_NEEDS_DRAFT.format(rule.name))
        counter.add(rule, "second runner")
        return rejection_sample_v2(
            rule,
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            num_speculative_steps,
        )

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


def _without_draft(rule: Rule) -> Rule:
    """The rule of a batch for which the first runner has lost the draft's probabilities.

    It loses them for single batches, where a request's drafts are older than its last step or were
    made in a greedy batch. With a one-hot draft the lossless rule follows the target, whatever
    proposed the token.

    Raises:
        RuntimeError: It has handed over none in many batches, so it drafts greedily.
    """
    counter.num_without_draft += 1
    if not counter.saw_draft and counter.num_without_draft > _MOST_WITHOUT_DRAFT:
        raise RuntimeError(_NEEDS_DRAFT.format(rule.name))
    if counter.num_without_draft == 1:
        _log.warning(
            "paceline: vLLM has no draft probabilities for a batch; its tokens follow the target"
        )
    return Lossless()
