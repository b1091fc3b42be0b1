"""Measures the speedup of alignment steps from caching the target's hidden states.

Runs the steps of a configuration on the same rows with recomputed and with cached hidden states,
interleaved, on one draft and one optimizer.

    python benchmarks/kept_states.py --config configs/direct/align.yaml --set target=MODEL
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from accelerate import Accelerator

from paceline.config import load_config
from paceline.data import read_records
from paceline.data.examples import build_examples
from paceline.data.sources import BatchSource, ExampleStream, FixedText, ReadText
from paceline.models import load_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.train import AlignConfig
from paceline.train.align import Planner
from paceline.train.loss import VocabularySample
from paceline.train.step import Stepper
from pairing import paired_seconds, ratio, show


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    config = load_config(AlignConfig, options.config, options.overrides)
    target = load_model(config.target, dtype="bfloat16")
    draft = load_model(config.draft, dtype="float32")
    vocab_size = check_same_vocabulary(target, draft)
    assert target.tokenizer is not None
    examples = build_examples(
        read_records(config.data.train),
        target.tokenizer,
        config.lengths,
    )[: options.steps * config.batch_size]
    streams = [ExampleStream(examples, config.batch_size, seed=0) for _ in range(2)]
    recomputed, cached = FixedText(streams[0]), ReadText(streams[1], target, limit_gb=100)
    stepper = Stepper(draft, target, config, Accelerator(), vocab_size=vocab_size, bfloat16=True)
    vocabulary = None
    if config.loss_vocabulary is not None and draft.draft_vocabulary is not None:
        vocabulary = VocabularySample(config.loss_vocabulary, draft.draft_vocabulary)
    planner = Planner(config, vocabulary)

    def step(source: BatchSource, number: int) -> None:
        stepper.step(source.next_batch().rows, 1e-4, planner(0.1, number))

    methods = [functools.partial(step, recomputed), functools.partial(step, cached)]
    first = paired_seconds(methods, options.steps)
    second = paired_seconds(methods, options.steps)
    print(f"first epoch, recomputed / cached: {show(ratio(*first))}")
    print(f"second epoch, recomputed / cached: {show(ratio(*second))}")
    tokens = sum(len(example.tokens) for example in examples)
    for name, spent in zip(("recomputed", "cached"), second, strict=True):
        rate = tokens / sum(spent)
        print(f"{name}: {sum(spent) / len(spent):.3f} s per step, {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
