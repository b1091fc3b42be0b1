"""Compares the measured speedup of speculative decoding with the predicted one.

For each gamma, greedy and at temperature 1, it divides the measured speedup after the first token
by tau / (c gamma + 1). tau is counted in the timed blocks. c is the time of a draft pass over the
time of a target pass, each sampling one token, measured between the requests. The formula assumes
that a target pass over gamma + 1 tokens costs as much as one over a single token, that a drafted
token costs a single draft pass, and that all other work is free. `drafting` and `block` are the
measured costs of drafting and of a block in target passes. With these, the remaining difference is
the overhead outside the models' forward passes.

    python benchmarks/overhead.py --target MODEL --draft MODEL --prompts FILE
"""

from __future__ import annotations

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.speed import predicted_speedup
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.latency import PassTimer, time_pairs
from paceline.progress import silent
from paceline.results import FIGURES, Row, Source
from pairing import pair_parser, served_pair, show


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    prompts = prompts[: options.num_prompts]
    text = (prompts[0] * 99)[: options.prompt_tokens + options.new_tokens // 2]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        print(f"temperature {temperature:g}")
        for gamma in options.gammas:
            costs = PassTimer(target, draft, text, [gamma], sampling).run(len(prompts))
            times = time_pairs(
                AutoregressiveDecoder(target, sampling=sampling),
                SpeculativeDecoder(target, draft, gamma=gamma, sampling=sampling),
                prompts,
                max_new_tokens=options.new_tokens,
                seed=0,
                progress=silent,
            )
            row = Row(
                population="prompts",
                units=tuple(range(len(prompts))),
                setting={"gamma": gamma},
                sums=times.sums,
                source=Source(command="benchmarks/overhead.py"),
            )
            speedup = FIGURES["decoding_speedup"].measure(row)
            tau, ratio = times.stats.block_efficiency, costs.cost_ratio
            drafting, block = costs.drafting_cost_ratio(gamma), costs.block_cost_ratio(gamma)
            predicted = predicted_speedup(tau, gamma, ratio)
            by_blocks = tau / costs.block_cost(gamma)
            print(
                f"gamma {gamma}: measured {show(speedup)}, tau {tau:.3f}, c {ratio:.3f}, "
                f"drafting {drafting:.3f}, block {block:.3f}; "
                f"measured / (tau / (c gamma + 1)) {speedup.value / predicted:.3f}, "
                f"measured / predicted from block times {speedup.value / by_blocks:.3f}"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
