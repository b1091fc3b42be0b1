"""Compares each acceptance rule in C with the same rule in PyTorch on the same texts.

A rule is kept in native/rules.c only if it makes a block at least 3% faster. With a rule in
PyTorch, a block takes two calls instead of one: C returns the logits, and Python verifies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

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
from pairing import pair_parser, paired_seconds, ratio, served_pair, show

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule

RULES: list[Rule] = [
    Lossless(),
    *(Lenient(kind, 0.4) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.3), Lossy(0.3, "tuned"), BiLDRule(1.5), Chow(0.6), ChowLog(2.0), Diff(0.1)),
    *(DiffLog(0.3), Opt(0.4), OptLog(0.5), TokenV1(0.2), TokenV2(0.2), TokenV3(0.6)),
]
# Functions that look up the C form of a rule; replaced to disable it.
LOOKUPS = ("paceline.models.llama.cpu_session.native_rule", "paceline.native.kernels.native_rule")


def main() -> None:
    parser = pair_parser(__doc__ or "")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    prompts = prompts[: options.num_prompts]
    for rule in RULES:
        decoder = SpeculativeDecoder(target, draft, rule, options.gamma, SamplingParams())

        def in_c(number: int, decoder: SpeculativeDecoder = decoder) -> int:
            (generation,) = decoder.generate(
                [prompts[number]], options.max_new_tokens, seed=number, eos_token_ids=[]
            )
            return generation.stats.num_blocks

        def in_pytorch(number: int, in_c=in_c) -> int:
            with patch(LOOKUPS[0], lambda _: None), patch(LOOKUPS[1], lambda _: None):
                return in_c(number)

        num_blocks = sum(in_c(number) for number in range(len(prompts)))
        native, plain = paired_seconds([in_c, in_pytorch], len(prompts))
        print(
            f"{rule!s:<55} {1e3 * sum(native) / num_blocks:5.1f} ms per block in C; "
            f"PyTorch / C {show(ratio(plain, native))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
