"""How much of what speculation promises is there when the clock is asked?

For each gamma, greedy and at temperature 1: the measured speedup from the first token on, over tau / (c gamma + 1), where tau is
counted in the very blocks that were timed and c is a draft pass over a target pass, each drawing a token, timed in turn between
the requests. The formula takes a target pass over gamma + 1 tokens for as long as one over a single token, a drafted token for as
dear as a single one, and everything beside passes for nothing. `drafting` and `block` are what blocks really take, so that the rest
is what is lost beside the passes.

    python benchmarks/overhead.py --target MODEL --draft MODEL --prompts FILE
"""

from __future__ import annotations

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.speed import predicted_speedup
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.latency import PassTimer, time_pairs
from paceline.progress import silent
from paceline.rng import named_generator
from pairing import pair_parser, served_pair


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    prompts = prompts[: options.num_prompts]
    middle = (prompts[0] * 99)[: options.prompt_tokens + options.new_tokens // 2]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        print(f"temperature {temperature:g}")
        for gamma in options.gammas:
            timer = PassTimer(target, draft, middle, [gamma], sampling)
            times = time_pairs(
                AutoregressiveDecoder(target, sampling=sampling),
                SpeculativeDecoder(target, draft, gamma=gamma, sampling=sampling),
                prompts,
                max_new_tokens=options.new_tokens,
                seed=0,
                num_repeats=1,
                progress=silent,
                between=timer.time_once,
            )
            costs = timer.costs()
            speedup = times.decoding_speedup(named_generator(0, "benchmark"))
            tau, ratio = times.stats.block_efficiency, costs.cost_ratio
            drafting, block = costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
            promised = predicted_speedup(tau, gamma, ratio)
            payable = costs.expected_speedup(tau, gamma)
            print(
                f"gamma {gamma}: measured {speedup.value:.3f} ({speedup.low:.3f} to {speedup.high:.3f}), "
                f"tau {tau:.3f}, c {ratio:.3f}, drafting {drafting:.3f}, block {block:.3f}; of tau / (c gamma + 1) "
                f"{speedup.value / promised:.3f}, with a block's own times {speedup.value / payable:.3f}"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
