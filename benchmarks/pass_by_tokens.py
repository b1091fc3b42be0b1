"""Measures a compiled pass over n tokens relative to one token, for each x86 instruction level.

Needs no files: the model has random weights in the shape of SmolLM2-135M. The context is 64 tokens.
Every level that this CPU supports is measured in a separate process, limited by PACELINE_CPU. The
passes of a process are interleaved.

    python benchmarks/pass_by_tokens.py
    python benchmarks/pass_by_tokens.py --levels avx2 --tokens 1 8 16 --rounds 40
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import processor
from paceline.models.hf.causal import CausalModel
from paceline.models.llama.cpu import CompiledSession, NativeLlama
from paceline.models.llama.cpu_weights import rounded_copy
from paceline.native import compiled
from pairing import paired_seconds, ratio, show

CONTEXT = 64


def session_of(hf: LlamaForCausalLM, *, int8: bool) -> CompiledSession:
    library = compiled()
    assert library is not None, "this needs a C compiler with OpenMP"
    native = NativeLlama(hf, None, int8=int8, library=library)
    session = CompiledSession(CausalModel(rounded_copy(hf) if int8 else hf), native)
    session.prefill([[7] * CONTEXT])
    return session


@torch.inference_mode()
def measure(counts: list[int], rounds: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    hf = LlamaForCausalLM(config).bfloat16()

    def forward(_: int, session: CompiledSession, tokens: torch.Tensor) -> None:
        session.extend(tokens)
        session.rollback([tokens.shape[1]])

    for weights in ("bfloat16", "int8"):
        session = session_of(hf, int8=weights == "int8")
        runs = [
            functools.partial(forward, session=session, tokens=torch.full((1, count), 9))
            for count in counts
        ]
        paired_seconds(runs, 2)
        spent = paired_seconds(runs, rounds)
        for count, seconds in zip(counts, spent, strict=True):
            milliseconds = 1000 * statistics.median(seconds)
            print(
                f"{processor.level():11} {weights:8} {count:4} tokens: {milliseconds:6.1f} ms, "
                f"{show(ratio(seconds, spent[0]))} relative to {counts[0]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    levels = processor.usable_levels()
    parser.add_argument("--levels", nargs="+", choices=levels, default=levels)
    counts = [1, 2, 4, 5, 8, 9, 12, 16, 24, 32, 64]
    parser.add_argument("--tokens", type=int, nargs="+", default=counts)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        measure(options.tokens, options.rounds)
        return
    for level in options.levels:
        command = [sys.executable, __file__, "--alone", "--rounds", str(options.rounds)]
        command += ["--tokens", *map(str, options.tokens)]
        limits = {processor.VARIABLE: level, **processor.limits_of(level)}
        subprocess.run(command, check=True, env={**os.environ, **limits})


if __name__ == "__main__":
    main()
