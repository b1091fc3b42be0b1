"""Shared by the benchmarks: interleaved timing, ratios with intervals, common options."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

from paceline.core.bootstrap import Interval, ratio_interval
from paceline.data import read_prompts
from paceline.models import load_model, prepare_for_decoding
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.models import CausalModel

    Run = Callable[[int], object]


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the CUDA device, if there is one, has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def paired_seconds(runs: Sequence[Run], count: int) -> list[list[float]]:
    """Seconds of each run for each of `count` cases; the order rotates from case to case."""
    spent = [[0.0] * count for _ in runs]
    for number in range(count):
        for offset in range(len(runs)):
            index = (offset + number) % len(runs)
            spent[index][number] = seconds(lambda run=runs[index], case=number: run(case))
    return spent


def ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Ratio of the sums with its 95% interval over the cases."""
    return ratio_interval((torch.tensor(over), torch.tensor(under)))


def show(found: Interval) -> str:
    """Format an interval as `1.234 (1.200 to 1.270)`."""
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def made_prompts(count: int, vocab_size: int, length: int = 64) -> list[list[int]]:
    """Random tokens."""
    rng = named_generator(0, "prompts")
    return [torch.randint(vocab_size, (length,), generator=rng).tolist() for _ in range(count)]


def pair_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that `served_pair` needs."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft-weights", default="int8")
    parser.add_argument(
        "--activations", default="float32", help="precision of the target's activations"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32)
    return parser


def served_pair(
    options: argparse.Namespace,
) -> tuple[CausalModel, CausalModel, list[list[int]]]:
    """Load target and draft as served, and the prompts."""
    target = prepare_for_decoding(load_model(options.target), activations=options.activations)
    draft = prepare_for_decoding(load_model(options.draft), options.draft_weights)
    assert target.tokenizer is not None
    prompts = read_prompts(options.prompts, target.tokenizer, max_tokens=options.prompt_tokens)
    return target, draft, prompts
