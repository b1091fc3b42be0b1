"""Compares speculative decoding with transformers' assisted generation.

Both use the same target, draft, gamma, sampling parameters and number of tokens, and are
interleaved in one process in alternating order. transformers runs the weights as loaded, Paceline
those that `paceline decode` uses, or with --plain the same as transformers. Prints for greedy
decoding and for temperature 1
  - seconds of assisted generation / seconds of Paceline, with its 95% interval; the same without
    a draft
  - the speedup from speculation in each library: plain decoding / speculative decoding

    python benchmarks/speculative_vs_assisted.py --target MODEL --draft MODEL --prompts FILE
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

    from paceline.decode.decoder import Decoder
    from paceline.models import HfModel


def transformers_tokens(
    target: HfModel,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: SamplingParams,
    draft: HfModel | None = None,
) -> int:
    """Generate exactly `num_tokens` tokens with transformers, assisted if there is a draft."""
    tokens = torch.tensor([list(prompt)], device=target.device)
    assisted = {} if draft is None else {"assistant_model": draft.hf}
    sampled = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    generated = target.hf.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=not sampling.greedy,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **assisted,
        **({} if sampling.greedy else sampled),
    )
    begun = len(prompt) if target.decoder_prompt is None else len(target.decoder_prompt)
    return generated.shape[1] - begun


def fix_block_length(draft: HfModel, gamma: int) -> None:
    """Turn off transformers' adaptive number of drafted tokens."""
    settings = draft.hf.generation_config
    settings.num_assistant_tokens = gamma
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0


def compare(
    plain: tuple[HfModel, HfModel],
    ready: tuple[HfModel, HfModel],
    prompts: list[list[int]],
    num_tokens: int,
    gamma: int,
    sampling: SamplingParams,
) -> None:
    """Print the paired ratios at one temperature."""

    def ours(decoder: Decoder, number: int) -> None:
        (text,) = decoder.generate([prompts[number]], num_tokens, number, eos_token_ids=[])
        assert len(text.tokens) == num_tokens

    def theirs(number: int, draft: HfModel | None) -> None:
        torch.manual_seed(number)
        count = transformers_tokens(plain[0], prompts[number], num_tokens, sampling, draft)
        assert count == num_tokens, f"transformers wrote {count} tokens of {num_tokens}"

    speculative = SpeculativeDecoder(*ready, gamma=gamma, sampling=sampling)
    alone = AutoregressiveDecoder(ready[0], sampling)
    methods = (
        lambda number: theirs(number, None),
        lambda number: theirs(number, plain[1]),
        lambda number: ours(alone, number),
        lambda number: ours(speculative, number),
    )
    for method in methods:  # warms up
        method(0)
    generate_s, assisted_s, alone_s, ours_s = paired_seconds(methods, len(prompts))
    rate = len(prompts) * num_tokens / sum(ours_s)
    print(f"temperature {sampling.temperature:g}, gamma {gamma}:")
    print(f"  assisted generation / ours {show(ratio(assisted_s, ours_s))}, {rate:.1f} tokens/s")
    print(f"  generate / ours, without a draft {show(ratio(generate_s, alone_s))}")
    print(f"  plain / speculative: ours {show(ratio(alone_s, ours_s))},", end=" ")
    print(f"transformers {show(ratio(generate_s, assisted_s))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--plain", action="store_true", help="use the weights as loaded")
    options = parser.parse_args()

    plain = tuple(load_model(name, dtype=options.dtype) for name in (options.target, options.draft))
    target, draft = plain
    assert target.tokenizer is not None
    prompts = read_prompts(
        options.prompts,
        target.tokenizer,
        max_tokens=options.prompt_tokens,
        encoder=target.decoder_prompt is not None,
    )
    prompts = prompts[: options.num_prompts]
    fix_block_length(draft, options.gamma)
    ready = target, draft
    if not options.plain:
        ready = prepare_for_decoding(target), prepare_for_decoding(draft, options.draft_weights)
    threads = torch.get_num_threads()
    print(f"{options.target}, {options.draft}, {target.dtype}, {threads} threads, ", end="")
    print(f"{len(prompts)} prompts x {options.new_tokens} tokens")
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        compare((target, draft), ready, prompts, options.new_tokens, options.gamma, sampling)


if __name__ == "__main__":
    main()
