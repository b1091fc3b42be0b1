"""The functions of vLLM 0.32.0 that the plugin replaces, and those that call them, in plain torch.

Order, arguments and what is overwritten in place are vLLM's; kernels and options are left out.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.engines import vllm_plugin

if TYPE_CHECKING:
    import pytest

_FIRST = """
import torch

def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    raise NotImplementedError  # on CPUs it returns memory that was not written

def apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata):
    if sampling_metadata.all_greedy:
        return logits
    temperature = expand_batch_to_tokens(
        sampling_metadata.temperature, cu_num_draft_tokens, len(logits), 0, 1
    )
    logits.div_(temperature.unsqueeze(-1))
    return keep_top_p(logits, sampling_metadata.top_p)

def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
    target_logits, bonus_token_ids, sampling_metadata, synthetic_mode=False,
    synthetic_conditional_rates=None, use_fp64_gumbel=False,
):
    raise NotImplementedError

class RejectionSampler:
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        target_logits = logits.to(torch.float32).clone() + sampling_metadata.penalty
        target_logits = apply_sampling_constraints(
            target_logits, metadata.cu_num_draft_tokens, sampling_metadata
        )
        return rejection_sample(
            metadata.draft_token_ids, metadata.num_draft_tokens, metadata.max_spec_len,
            metadata.cu_num_draft_tokens, draft_probs, target_logits, metadata.bonus_token_ids,
            sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None,
            use_fp64_gumbel=False,
        )
"""

_DRAFTER = """
import torch

def compute_probs_and_sample_next_token(logits, sampling_metadata, use_fp64_gumbel=False):
    if sampling_metadata.all_greedy:
        return logits.argmax(dim=-1), logits
    temperature = torch.where(
        sampling_metadata.temperature < 1e-5, 1.0, sampling_metadata.temperature
    )
    logits.div_(temperature.view(-1, 1))
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    noise = torch.empty_like(probs).exponential_()
    return (probs / noise).argmax(dim=-1), probs
"""

_STATES = """
class SamplingStates:
    def any_greedy(self, idx_mapping_np):
        return bool((self.temperature.gpu[idx_mapping_np] == 0).any())

    def apply_temperature(self, logits, expanded_idx_mapping, idx_mapping_np):
        temperature = self.temperature.gpu[expanded_idx_mapping.long()]
        logits.div_(temperature.where(temperature > 0, 1.0).unsqueeze(-1))
"""

_SAMPLER = """
class Sampler:
    def apply_sampling_params(
        self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids,
        expanded_local_pos, seq_lens_upper_bound_np, skip_top_k_top_p=False,
    ):
        if not self.needs_logits_processing:
            return logits
        logits = logits.float().clone() + self.penalty
        self.sampling_states.apply_temperature(logits, expanded_idx_mapping, idx_mapping_np)
        return logits if skip_top_k_top_p else keep_top_p(logits, self.top_p)
"""

_SECOND = """
def rejection_sample(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping,
    expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps,
    synthetic_conditional_rates=None, use_fp64=False, use_block_verification=False,
    contexts=None, watermarking=None, watermarking_skip_mask=None, watermark_key=None,
):
    raise NotImplementedError

class RejectionSampler:
    def _verify(
        self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping,
        idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np,
        verify_draft_sampled,
    ):
        processed_logits = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled,
            expanded_local_pos, seq_lens_upper_bound_np,
        )
        sampled, num_sampled = rejection_sample(
            processed_logits, draft_logits, verify_draft_sampled, cu_num_logits, pos, idx_mapping,
            expanded_idx_mapping, expanded_local_pos,
            self.sampler.sampling_states.temperature.gpu, self.sampler.sampling_states.seeds.gpu,
            self.num_speculative_steps, None, use_fp64=False, use_block_verification=False,
        )
        return processed_logits, sampled, num_sampled
"""

_SOURCES = {
    vllm_plugin._V1: _FIRST,
    vllm_plugin._DRAFTER: _DRAFTER,
    vllm_plugin._V2: _SECOND,
    vllm_plugin._SAMPLER: _SAMPLER,
    vllm_plugin._STATES: _STATES,
}


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """-inf for all but the most likely tokens whose mass reaches `top_p`; a new tensor."""
    ordered, places = logits.softmax(-1).sort(-1, descending=True)
    cut = ordered.cumsum(-1) - ordered >= top_p
    cut = torch.zeros_like(cut).scatter(-1, places, cut)
    return logits.masked_fill(cut, -torch.inf) if top_p < 1 else logits


class FakeVllm:
    """Modules of vLLM, importable by their names, with the functions of above."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._modules: dict[str, Any] = {}
        for name, source in _SOURCES.items():
            parts = name.split(".")
            for count in range(1, len(parts)):
                part = ".".join(parts[:count])
                if part not in sys.modules:
                    monkeypatch.setitem(sys.modules, part, ModuleType(part))
            module = self._modules[name] = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            module.__dict__["keep_top_p"] = keep_top_p
            exec(source, module.__dict__)
        monkeypatch.setattr(vllm_plugin, "counter", vllm_plugin.Counter())

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def functions(self) -> list[Any]:
        """Those that the plugin replaces."""
        return [one for *_, one in vllm_plugin._originals()]

    def draft(self, logits_NV: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
        """Tokens, and what vLLM keeps as their probabilities; overwrites the logits."""
        return self[vllm_plugin._DRAFTER].compute_probs_and_sample_next_token(logits_NV, settings)

    def judge_first(
        self, drafts_BK: Tensor, draft_probs: Tensor | None, logits_NV: Tensor, settings: Any
    ) -> Tensor:
        """A step of the first runner; the bonus token is 0."""
        count, width = drafts_BK.shape
        metadata = SimpleNamespace(
            draft_token_ids=drafts_BK.flatten().to(torch.int32),
            num_draft_tokens=[width] * count,
            max_spec_len=width,
            cu_num_draft_tokens=width * torch.arange(1, count + 1, dtype=torch.int32),
            bonus_token_ids=torch.zeros(count, 1, dtype=torch.int32),
        )
        sampler = self[vllm_plugin._V1].RejectionSampler()
        return sampler.forward(metadata, draft_probs, logits_NV, settings)

    def judge_second(
        self,
        drafts_BK: Tensor,
        draft_logits: Tensor | None,
        logits_NV: Tensor,
        temperature_B: Tensor,
        *,
        top_p: float = 1.0,
        penalty: Tensor | float = 0.0,
        processes: bool = True,
    ) -> Tensor:
        """A step of the second runner, with one row of logits more for each request."""
        count, width = drafts_BK.shape
        states = self[vllm_plugin._STATES].SamplingStates()
        states.temperature = SimpleNamespace(gpu=temperature_B)
        seeds = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(3))
        states.seeds = SimpleNamespace(gpu=seeds)
        sampler = self[vllm_plugin._SAMPLER].Sampler()
        sampler.sampling_states, sampler.top_p, sampler.penalty = states, top_p, penalty
        sampler.needs_logits_processing = processes
        judge = self[vllm_plugin._V2].RejectionSampler()
        judge.sampler, judge.num_speculative_steps = sampler, width
        sampled = torch.cat([torch.zeros(count, 1), drafts_BK], 1).flatten().to(torch.int32)
        places, rows = torch.arange(count, dtype=torch.int32), width + 1
        shaped, tokens, counts = judge._verify(
            *(logits_NV, draft_logits, sampled, torch.arange(rows).repeat(count) + 40),
            *(rows * torch.arange(count + 1, dtype=torch.int32), places, places.numpy()),
            *(places.repeat_interleave(rows), torch.arange(rows).repeat(count), None, sampled),
        )
        assert shaped is not logits_NV or not processes
        assert torch.equal(counts.long(), (tokens >= 0).sum(-1))
        return tokens


def settings_of(
    temperature_B: Tensor | None, *, top_p: float = 1.0, penalty: Tensor | float = 0.0
) -> SimpleNamespace:
    """vLLM's sampling metadata; None: all requests are greedy."""
    greedy = temperature_B is None
    return SimpleNamespace(
        temperature=temperature_B,
        all_greedy=greedy,
        all_random=not greedy and bool((temperature_B > 0).all()),
        generators={},
        top_p=top_p,
        penalty=penalty,
    )
