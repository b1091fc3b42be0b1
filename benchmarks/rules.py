"""Compares what a block costs under each acceptance rule with a block under the lossless rule.

The lossless rule is verified in C, in the call that runs the target's pass. Under another rule C
returns the logits, and PyTorch verifies. The bonus token of a cascade follows pi, for which the
draft also processes its last token: one draft pass more per block.
"""

from __future__ import annotations

import time

from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from pairing import pair_parser, ratio, served_pair, show

RULES = [
    *(Lenient(kind, 0.4) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.3), Lossy(0.3, "tuned"), BiLDRule(1.5), Chow(0.6), ChowLog(2.0), Diff(0.1)),
    *(DiffLog(0.3), Opt(0.4), OptLog(0.5), TokenV1(0.2), TokenV2(0.2), TokenV3(0.6)),
]


def main() -> None:
    parser = pair_parser(__doc__ or "")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    sampling = SamplingParams(temperature=options.temperature)

    def block_seconds(decoder: SpeculativeDecoder, number: int) -> float:
        """CPU seconds per block of one text."""
        start = time.process_time()
        (generation,) = decoder.generate(
            [prompts[number]], options.max_new_tokens, seed=number, eos_token_ids=[]
        )
        return (time.process_time() - start) / generation.stats.num_blocks

    lossless = SpeculativeDecoder(target, draft, Lossless(), options.gamma, sampling)
    for rule in RULES:
        decoder = SpeculativeDecoder(target, draft, rule, options.gamma, sampling)
        block_seconds(decoder, 0)
        cases = range(options.num_prompts)
        pairs = [(block_seconds(decoder, case), block_seconds(lossless, case)) for case in cases]
        under_rule, under_lossless = zip(*pairs, strict=True)
        print(
            f"{rule!s:<55} {1e3 * sum(under_rule) / len(pairs):5.1f} ms per block; "
            f"rule / lossless {show(ratio(under_rule, under_lossless))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
