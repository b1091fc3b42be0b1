"""Compares a draft with its vocabulary subset to the same draft with the whole vocabulary.

Prints the acceptance of both on the same target text, the target's probability mass outside the
subset, which bounds the loss in acceptance, and the interleaved times per drafted token.

    python benchmarks/draft_vocabulary.py --target MODEL --draft DRAFT --prompts FILE
"""

from __future__ import annotations

import argparse
import statistics
import time

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.bootstrap import ratio_interval
from paceline.core.sampling import SamplingParams, to_probs
from paceline.data import read_prompts
from paceline.decode import AutoregressiveDecoder
from paceline.decode.block import draw
from paceline.measure.acceptance import PairTexts, forced_logits, score_texts
from paceline.models import CausalModel, load_model, prepare_for_decoding, wrap_model
from pairing import ratio, show


def draw_s(model: CausalModel, prompt: list[int], count: int) -> float:
    """Seconds per token drafted after a prompt."""
    session = model.start_session()
    session.prefill([prompt])
    started = time.perf_counter()
    plan = DrawPlan(count, SamplingParams())
    draw(session, DrawRequest([[prompt[-1]]], plan, [[0.5] * count]))
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="a draft with draft_vocabulary.json")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    target = load_model(options.target)
    some = load_model(options.draft)
    if some.draft_vocabulary is None or target.tokenizer is None:
        raise SystemExit("wanted a draft with a vocabulary subset, and a target with a tokenizer")
    every = wrap_model(some.hf, some.tokenizer)
    served = prepare_for_decoding(target)
    prompts = read_prompts(options.prompts, target.tokenizer, max_tokens=32)[: options.num_prompts]
    decoder = AutoregressiveDecoder(served, SamplingParams())
    texts = [generation.tokens for generation in decoder.generate(prompts, options.new_tokens)]
    for name, draft in (("subset", some), ("whole", every)):
        scores = score_texts(PairTexts(target, draft, prompts, texts, SamplingParams()))
        lengths = scores.mask_BT.sum(-1)
        acceptance = ratio_interval((scores.acceptance_BT.sum(-1), lengths))
        print(f"{name}: acceptance {show(acceptance)}")
    outside = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        logits_TV = forced_logits(target, prompt, text, SamplingParams(), target.vocab_size)
        probs_TV = to_probs(logits_TV, SamplingParams())
        outside += float(1 - probs_TV[:, some.draft_vocabulary].sum(-1).mean()) / len(texts)
    size = len(some.draft_vocabulary)
    print(f"target's probability mass outside the {size:,} tokens: {outside:.4f}")
    ready = [prepare_for_decoding(model) for model in (every, some)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(options.repeats):
        for side in (0, 1) if repeat % 2 else (1, 0):
            seconds[side].append(draw_s(ready[side], prompts[repeat % len(prompts)], 8))
    whole_ms, some_ms = (1e3 * statistics.median(times) for times in seconds)
    print(f"per drafted token: whole {whole_ms:.2f} ms, subset {some_ms:.2f} ms")
    print(f"whole / subset {show(ratio(*seconds))}")


if __name__ == "__main__":
    main()
