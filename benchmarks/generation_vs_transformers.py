"""Compares the throughput of generating training text with transformers' `generate`.

transformers generates left-padded batches one after another; a batch lasts until its longest text
ends. Paceline uses continuous batching: the next prompt takes the row of a finished text. It runs
with and without a draft. All use the same prompts in rounds of alternating order, and stop tokens
apply. The result is tokens per second, since the methods can generate different numbers of tokens.

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

    Generate = Callable[[Sequence[Sequence[int]], int], int]


def generate_with_transformers(
    model: CausalModel,
    sampling: SamplingParams,
    size: int,
    new_tokens: int,
    prompts: Sequence[Sequence[int]],
    seed: int,
) -> int:
    """Number of new tokens of all texts, including stop tokens."""
    torch.manual_seed(seed)
    stops = set(model.eos_token_ids)
    pad = model.eos_token_ids[0]
    num_tokens = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        width = max(map(len, batch))
        tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in batch])
        num_padding = torch.tensor([[width - len(prompt)] for prompt in batch])
        found = model.hf.generate(
            tokens,
            attention_mask=(torch.arange(width) >= num_padding).long(),
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=sampling.top_p,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
            eos_token_id=list(stops),
        )
        for text in found[:, width:].tolist():
            ends = [index + 1 for index, token in enumerate(text) if token in stops]
            num_tokens += ends[0] if ends else len(text)
    return num_tokens


def generate(
    decoder: Decoder, size: int, new_tokens: int, prompts: Sequence[Sequence[int]], seed: int
) -> int:
    """Number of new tokens of all texts from one of Paceline's decoders."""
    found = decoder.generate(prompts, new_tokens, seed, batch_size=size)
    return sum(len(generation.tokens) for generation in found)


def rate(run: Generate, prompts: Sequence[Sequence[int]], seed: int) -> float:
    """New tokens per second."""
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
    methods: dict[str, Generate] = {
        "transformers": functools.partial(generate_with_transformers, plain, sampling, *shape),
        "ours": functools.partial(generate, AutoregressiveDecoder(target, sampling), *shape),
        f"ours with draft, gamma {options.gamma}": functools.partial(generate, speculative, *shape),
    }
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(options.rounds):
        start = number * options.num_prompts % len(prompts)
        chosen = (prompts + prompts)[start : start + options.num_prompts]
        for name in sorted(methods, reverse=number % 2 == 1):
            rates[name].append(rate(methods[name], chosen, number))
    theirs = rates["transformers"]
    for name, found in rates.items():
        print(
            f"{name}, {options.batch} rows: {sum(found) / len(found):.0f} tokens/s, "
            f"{show(ratio(found, theirs))} relative to transformers"
        )


if __name__ == "__main__":
    main()
