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
def rejection_sample(*arguments):
    raise NotImplementedError
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

_JUDGE = """
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
    vllm_plugin._FIRST: _FIRST,
    vllm_plugin._JUDGE: _JUDGE,
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

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def functions(self) -> list[Any]:
        """Those that the plugin replaces."""
        return [one for *_, one in vllm_plugin.originals()]

    def judge(
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
        """A step with one row of logits more for each request than drafts."""
        count, width = drafts_BK.shape
        states = self[vllm_plugin._STATES].SamplingStates()
        states.temperature = SimpleNamespace(gpu=temperature_B)
        seeds = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(3))
        states.seeds = SimpleNamespace(gpu=seeds)
        sampler = self[vllm_plugin._SAMPLER].Sampler()
        sampler.sampling_states, sampler.top_p, sampler.penalty = states, top_p, penalty
        sampler.needs_logits_processing = processes
        judge = self[vllm_plugin._JUDGE].RejectionSampler()
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
