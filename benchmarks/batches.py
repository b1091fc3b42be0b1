"""Measures throughput by batch size, and the cost of rows that accept different numbers of tokens.

All cases are interleaved in one process, sample at temperature 1 and ignore stop tokens. Prints
  - tokens per second of the whole batch for each batch size, relative to the first one, for plain
    and speculative decoding
  - ragged / equal: median seconds per block of eight rows of one prompt with different seeds, and
    so different numbers of accepted tokens, over eight rows with the same seed

    python benchmarks/batches.py --target MODEL --draft MODEL --prompts FILE
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import torch

from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.text import Text
from pairing import pair_parser, ratio, served_pair, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decode.decoder import Decoder

ROWS = 8


@torch.inference_mode()
def decode(
    decoder: Decoder, prompts: Sequence[list[int]], seeds: Sequence[int], num_blocks: int
) -> tuple[list[float], int, set[int]]:
    """Seconds of each block of all rows, total number of tokens, and distinct tokens per block."""
    budget = (num_blocks + 1) * 9  # enough for gamma 8
    texts = [
        Text(prompt, budget, (), seed, cut=False, context=prompt)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    blocks = decoder.blocks(texts)
    for _ in range(len(texts)):
        next(blocks)  # prefill yields the first token
    made: list[int] = []
    seconds: list[float] = []
    for _ in range(num_blocks):
        started = time.perf_counter()
        made += [len(block.tokens) for _, block in itertools.islice(blocks, len(texts))]
        seconds.append(time.perf_counter() - started)
    return seconds, sum(made), set(made)


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    target, draft, texts = served_pair(options)
    whole = [text for text in texts if len(text) == options.prompt_tokens]
    decoders: dict[str, Decoder] = {
        "plain": AutoregressiveDecoder(target),
        f"speculative, gamma {options.gamma}": SpeculativeDecoder(
            target, draft, gamma=options.gamma
        ),
    }
    rates: dict[tuple[str, int], list[float]] = {}
    spent: dict[str, list[float]] = {"ragged": [], "equal": []}
    speculative = list(decoders.values())[1]
    for number in range(-1, options.rounds):  # the first round warms up
        start = number * max(options.batches) % len(whole)
        prompts = list(
            itertools.islice(itertools.cycle(whole), start, start + max(options.batches))
        )
        for (name, decoder), batch in itertools.product(decoders.items(), options.batches):
            seeds = range(100 * number + 100, 100 * number + 100 + batch)
            seconds, tokens, _ = decode(decoder, prompts[:batch], list(seeds), options.blocks)
            if number >= 0:
                rates.setdefault((name, batch), []).append(tokens / sum(seconds))
        kinds = {"ragged": list(range(number + 1, number + 1 + ROWS)), "equal": [number + 1] * ROWS}
        for kind in sorted(kinds, reverse=number % 2 == 1):
            seconds, _, sizes = decode(speculative, prompts[:1] * ROWS, kinds[kind], options.blocks)
            assert len(sizes) > 1, "this benchmark needs blocks of different lengths"
            if number >= 0:
                spent[kind].append(statistics.median(seconds))
    for name in decoders:
        for batch in options.batches:
            found = rates[name, batch]
            print(
                f"{name}, batch {batch}: {sum(found) / len(found):.0f} tokens/s, "
                f"{show(ratio(found, rates[name, options.batches[0]]))} relative to batch "
                f"{options.batches[0]}"
            )
    print(f"ragged / equal, batch {ROWS}: {show(ratio(spent['ragged'], spent['equal']))}")


if __name__ == "__main__":
    main()
