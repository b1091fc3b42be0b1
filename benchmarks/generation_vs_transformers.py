"""How fast does a target write text for training: many prompts, a batch at a time?

Theirs is `generate` on one batch after the other, padded on the left; each lasts until its longest text ends. Ours gives the
place of a text that ends to the next prompt, with and without a draft. The same prompts in rounds, the first to go changing
every round, stop tokens in force; tokens a second, as they may write different numbers of them.

    python benchmarks/generation_vs_transformers.py --target MODEL --draft MODEL --prompts FILE
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch

from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.models import load_model, prepare_for_decoding
from pairing import pair_parser, ratio, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.decode.decoder import Decoder
    from paceline.models import CausalModel

    Write = Callable[[Sequence[Sequence[int]], int], int]


def write_with_transformers(
    model: CausalModel,
    sampling: SamplingParams,
    size: int,
    new_tokens: int,
    prompts: Sequence[Sequence[int]],
    seed: int,
) -> int:
    """New tokens of all texts, stop tokens included."""
    torch.manual_seed(seed)
    stops = set(model.eos_token_ids)
    pad = model.eos_token_ids[0]
    written = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        width = max(map(len, batch))
        tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in batch])
        holes = torch.tensor([[width - len(prompt)] for prompt in batch])
        found = model.hf.generate(
            tokens,
            attention_mask=(torch.arange(width) >= holes).long(),
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=sampling.top_p,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
            eos_token_id=list(stops),
        )
        for text in found[:, width:].tolist():
            ends = [place + 1 for place, token in enumerate(text) if token in stops]
            written += ends[0] if ends else len(text)
    return written


def write(
    decoder: Decoder, size: int, new_tokens: int, prompts: Sequence[Sequence[int]], seed: int
) -> int:
    """The same with a decoder of ours."""
    found = decoder.generate(prompts, new_tokens, seed, batch_size=size)
    return sum(len(generation.tokens) for generation in found)


def rate(run: Write, prompts: Sequence[Sequence[int]], seed: int) -> float:
    """New tokens a second."""
    started = time.perf_counter()
    return run(prompts, seed) / (time.perf_counter() - started)


def main() -> None:
    parser = pair_parser(__doc__ or "")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plain = load_model(options.target)
    target = prepare_for_decoding(plain, activations=options.activations)
    draft = prepare_for_decoding(load_model(options.draft), options.draft_weights)
    assert target.tokenizer is not None
    prompts = read_prompts(options.prompts, target.tokenizer, max_tokens=options.prompt_tokens)
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    speculative = SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=sampling)
    shape = options.batch, options.new_tokens
    ways: dict[str, Write] = {
        "transformers": functools.partial(write_with_transformers, plain, sampling, *shape),
        "ours": functools.partial(write, AutoregressiveDecoder(target, sampling), *shape),
        f"ours with the draft, gamma {options.gamma}": functools.partial(
            write, speculative, *shape
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        start = number * options.num_prompts % len(prompts)
        chosen = (prompts + prompts)[start : start + options.num_prompts]
        for name in sorted(ways, reverse=number % 2 == 1):
            rates[name].append(rate(ways[name], chosen, number))
    theirs = rates["transformers"]
    for name, found in rates.items():
        print(
            f"{name}, {options.batch} rows: {sum(found) / len(found):.0f} tokens/s, "
            f"{show(ratio(found, theirs))} of transformers"
        )


if __name__ == "__main__":
    main()
