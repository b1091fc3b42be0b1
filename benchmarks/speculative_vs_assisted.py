"""How much faster is our speculative decoding than transformers' assisted generation?

Same target, same draft, same gamma, same sampler, same number of tokens; interleaved in one process,
the first to go changing every time. Theirs runs the weights as they are loaded; ours those that
`paceline decode` uses, or with --plain the same as theirs. Prints for greedy decoding and for temperature 1:
  - seconds of assisted generation / seconds of ours, with its interval
  - what speculation brings to either: plain decoding / speculative, same library

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
    from paceline.models import CausalModel


def transformers_tokens(
    target: CausalModel,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: SamplingParams,
    draft: CausalModel | None = None,
) -> int:
    """Exactly this many tokens by transformers, assisted if there is a draft."""
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
    return generated.shape[1] - len(prompt)


def fix_block_length(draft: CausalModel, gamma: int) -> None:
    """Without this, transformers drafts more or less as it goes."""
    settings = draft.hf.generation_config
    settings.num_assistant_tokens = gamma
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0


def compare(
    plain: tuple[CausalModel, CausalModel],
    ready: tuple[CausalModel, CausalModel],
    prompts: list[list[int]],
    num_tokens: int,
    gamma: int,
    sampling: SamplingParams,
) -> None:
    """Print the paired ratios at one temperature."""

    def ours(decoder: Decoder, number: int) -> None:
        (text,) = decoder.generate([prompts[number]], num_tokens, number, eos_token_ids=[])
        assert len(text.tokens) == num_tokens

    def theirs(number: int, draft: CausalModel | None) -> None:
        torch.manual_seed(number)
        count = transformers_tokens(plain[0], prompts[number], num_tokens, sampling, draft)
        assert count == num_tokens, f"transformers wrote {count} tokens of {num_tokens}"

    speculative = SpeculativeDecoder(*ready, gamma=gamma, sampling=sampling)
    alone = AutoregressiveDecoder(ready[0], sampling)
    ways = (
        lambda number: theirs(number, None),
        lambda number: theirs(number, plain[1]),
        lambda number: ours(alone, number),
        lambda number: ours(speculative, number),
    )
    for way in ways:  # warms up
        way(0)
    generate_s, assisted_s, alone_s, ours_s = paired_seconds(ways, len(prompts))
    rate = len(prompts) * num_tokens / sum(ours_s)
    print(f"temperature {sampling.temperature:g}, gamma {gamma}:")
    print(f"  assisted generation / ours {show(ratio(assisted_s, ours_s))}, {rate:.1f} tokens/s")
    print(f"  speculation brings us {show(ratio(alone_s, ours_s))},", end=" ")
    print(f"transformers {show(ratio(generate_s, assisted_s))}")


def main() -> None:
    """Parse and run."""
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
    parser.add_argument("--plain", action="store_true", help="no weights prepared for decoding")
    options = parser.parse_args()

    plain = tuple(load_model(name, dtype=options.dtype) for name in (options.target, options.draft))
    target, draft = plain
    assert target.tokenizer is not None
    prompts = read_prompts(options.prompts, target.tokenizer, max_tokens=options.prompt_tokens)
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
