"""Compares the speed and the text of plain decoding with transformers' `generate`.

Both use the same model, data type, prompts and number of tokens, and are interleaved in one
process in alternating order. Prints
  - seconds of `generate` / seconds of `AutoregressiveDecoder`, with its 95% interval, for the
    unmodified weights and for the weights that `paceline decode` uses
  - with --draft: how many greedy speculative texts equal transformers' greedy text (float32)

    python benchmarks/baseline_vs_transformers.py --target MODEL --prompts FILE [--draft MODEL]
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.models import load_model, prepare_for_decoding
from pairing import paired_seconds, ratio, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models import CausalModel


def transformers_generate(model: CausalModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Exactly `num_tokens` greedy tokens from transformers."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    generated = model.hf.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


def ours(model: CausalModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Exactly `num_tokens` greedy tokens from `AutoregressiveDecoder`."""
    decoder = AutoregressiveDecoder(model, SamplingParams(temperature=0))
    return decoder.generate([prompt], num_tokens, eos_token_ids=[])[0].tokens


def compare_speed(
    name: str, theirs: CausalModel, model: CausalModel, prompts: list[list[int]], num_tokens: int
) -> None:
    """Print the paired ratio."""
    for warm in (transformers_generate, ours):
        warm(theirs if warm is transformers_generate else model, prompts[0], 8)
    theirs_s, ours_s = paired_seconds(
        (
            lambda number: transformers_generate(theirs, prompts[number], num_tokens),
            lambda number: ours(model, prompts[number], num_tokens),
        ),
        len(prompts),
    )
    rate = len(prompts) * num_tokens / sum(ours_s)
    print(
        f"{name}: generate / ours = {show(ratio(theirs_s, ours_s))}, "
        f"ours {rate:.1f} tokens/s, {len(prompts)} prompts x {num_tokens} tokens"
    )


def compare_text(
    target: CausalModel, draft: CausalModel, prompts: list[list[int]], num_tokens: int
) -> None:
    """Print how many greedy speculative texts equal those of transformers."""
    decoder = SpeculativeDecoder(target, draft, gamma=4, sampling=SamplingParams(temperature=0))
    same = 0
    for prompt in prompts:
        text = decoder.generate([prompt], num_tokens, eos_token_ids=[])[0].tokens
        same += text == transformers_generate(target, prompt, num_tokens)
    print(
        f"greedy speculative text equals transformers' generate: {same} of {len(prompts)} prompts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    plain = load_model(options.target, dtype=options.dtype)
    assert plain.tokenizer is not None
    prompts = read_prompts(options.prompts, plain.tokenizer, max_tokens=options.prompt_tokens)
    prompts = prompts[: options.num_prompts]
    print(f"{options.target}, {plain.dtype}, {torch.get_num_threads()} threads")
    compare_speed("unmodified weights", plain, plain, prompts, options.new_tokens)
    prepared = prepare_for_decoding(plain)
    compare_speed("decoding weights", plain, prepared, prompts, options.new_tokens)
    if options.draft:
        target = load_model(options.target, dtype="float32")
        draft = load_model(options.draft, dtype="float32")
        compare_text(target, draft, prompts, options.new_tokens)


if __name__ == "__main__":
    main()
