"""Seconds of a step of vLLM under its own sampler and under rules of Paceline's plugin.

In one process and with the same requests: the sampler is exchanged between batches, whose order is
random. It needs a GPU, on which vLLM uses its second model runner. Run it with vLLM's Python, in
whose environment Paceline is installed:

    python benchmarks/vllm_rules.py --target DIR --draft DIR
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import time
from typing import TYPE_CHECKING, Any

import torch

from pairing import ratio, show

if TYPE_CHECKING:
    from collections.abc import Callable

OWN = "vLLM's own"
RULES = {
    OWN: None,
    "lossless": '{"rule": "lossless"}',
    "token_v3": '{"rule": "token_v3", "alpha": 0.3}',
    "opt": '{"rule": "opt", "alpha": 0.1}',
    "chow": '{"rule": "chow", "alpha": 0.3}',
}


class Timed:
    """A sampler that adds up its seconds and counts its calls; it is called with drafts alone."""

    def __init__(self, sample: Callable[..., Any]) -> None:
        self._sample = sample
        self.seconds, self.num_calls = 0.0, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found = self._sample(*arguments, **named)
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begun
        self.num_calls += 1
        return found


def functions() -> dict[str, list[tuple[Any, str, Any]]]:
    """For each sampler: modules or classes of vLLM, names in them, and functions to put there."""
    from paceline.engines.vllm_plugin import originals, read_rule, replacements

    own = originals()
    return {
        name: own if rule is None else replacements(read_rule(rule)) for name, rule in RULES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    found = functions()
    speculation = {
        "method": "draft_model",
        "model": given.draft,
        "num_speculative_tokens": given.gamma,
        "draft_sample_method": "probabilistic",
    }
    llm = LLM(
        model=given.target,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=given.batch,
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    params = SamplingParams(
        temperature=1.0, max_tokens=given.max_tokens, ignore_eos=True, detokenize=False
    )
    per_step: dict[str, list[float]] = {name: [] for name in found}
    in_sampler: dict[str, list[float]] = {name: [] for name in found}
    rng = random.Random(0)
    for number in range(1 + given.rounds):
        prompts = [
            {"prompt_token_ids": [rng.randrange(100, 10_000) for _ in range(16)]}
            for _ in range(given.batch)
        ]
        for name in rng.sample(list(found), len(found)):
            for place, function, new in found[name]:
                setattr(place, function, new)
            timed = module.rejection_sample = Timed(module.rejection_sample)
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number:  # the first round warms up
                per_step[name].append((time.perf_counter() - begun) / timed.num_calls)
                in_sampler[name].append(timed.seconds / timed.num_calls)
    print(f"batch {given.batch}, gamma {given.gamma}, {given.rounds} rounds")
    for name in found:
        step, inside = (torch.tensor(times[name]).mean() for times in (per_step, in_sampler))
        print(
            f"{name:12} {1000 * step:7.2f} ms per step, {1000 * inside:6.2f} ms of it in the "
            f"sampler; step / own {show(ratio(per_step[name], per_step[OWN]))}, "
            f"sampler / own {show(ratio(in_sampler[name], in_sampler[OWN]))}"
        )


if __name__ == "__main__":
    main()
