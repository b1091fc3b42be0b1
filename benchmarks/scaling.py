"""Measures how the loss scales with the vocabulary, and a pass with tokens, rows and context.

Needs no files: heads and models have random weights, with bfloat16 products where the CPU supports
them and float32 accumulation. Prints
  - loss and gradients of 1,024 tokens by vocabulary size: milliseconds, and peak memory in a
    separate process, without hidden states, both heads and the head's gradients, next to the size
    of the logits of one chunk and of all tokens, of both models
  - milliseconds of a compiled pass of a 30-layer model of hidden size 576, by number of new tokens,
    rows and context

    python benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.fused import Head, chunked_loss
from paceline.models import prepare_for_decoding, wrap_model
from paceline.native.kernels import losses_and_slopes
from paceline.native.structures import DivergenceKind, Term

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TOKENS, WIDTH, CHUNK = 1024, 576, 256


def milliseconds(run: Callable[[], object], repeats: int = 9) -> float:
    run()
    spent: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        spent.append(1000 * (time.perf_counter() - started))
    return statistics.median(spent)


def loss_of(vocab_size: int) -> tuple[float, float]:
    """Milliseconds, and peak memory in MiB without inputs and gradients."""
    hidden = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    heads = [torch.randn(vocab_size, WIDTH) / 24 for _ in range(2)]
    target, weight = heads[0].bfloat16(), heads[1].requires_grad_()
    del heads
    terms = [Term(DivergenceKind.FORWARD_KL, 1.0, 0.0)]
    labels, weights = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS)

    def loss_of_chunk(hidden_CD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits_CV = hidden_CD @ weight.detach().to(hidden_CD.dtype).T
        theirs = hidden.detach()[rows] @ target.T
        losses_C = losses_and_slopes(terms, theirs, logits_CV, labels[rows], weights[rows])
        return losses_C, logits_CV

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked_loss(
                hidden, Head(weight), loss_of_chunk, weights, chunk_size=CHUNK, part_size=2048
            )
        loss.backward()
        hidden.grad = weight.grad = None

    small = torch.randn(8, 8).bfloat16()
    _ = small @ small  # the library allocates memory at its first product
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _mebibytes("VmRSS")
    spent = milliseconds(step, repeats=3)
    of_weight = weight.numel() * weight.element_size() / 2**20
    return spent, _mebibytes("VmHWM") - before - of_weight


def _mebibytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def by_vocabulary(sizes: list[int]) -> None:
    print(f"loss and gradients of {TOKENS} tokens, chunks of {CHUNK}, by vocabulary size")
    for size in sizes:
        command = [sys.executable, __file__, "--alone", str(size)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        spent, beyond = map(float, done.stdout.split())
        chunk = 2 * CHUNK * size * 2 / 2**20
        print(
            f"  {size:7d}: {spent:7.1f} ms, {beyond:5.0f} MiB; logits of one chunk {chunk:.0f} "
            f"MiB, of all tokens {chunk * TOKENS / CHUNK:.0f} MiB"
        )


@torch.inference_mode()
def passes() -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = prepare_for_decoding(wrap_model(LlamaForCausalLM(config).bfloat16()))
    reader = getattr(model.decoder, "native", None)
    print(f"milliseconds per pass, {'compiled' if reader else 'PyTorch'}")
    for name, cases in {
        "by new tokens, context 64": [(1, count, 64) for count in (1, 2, 4, 8, 16, 32)],
        "by rows of one new token, context 64": [(rows, 1, 64) for rows in (1, 2, 4, 8, 16, 32)],
        "by context, one new token": [(1, 1, context) for context in (64, 256, 1024, 4096)],
        "by context, four new tokens": [(1, 4, context) for context in (64, 256, 1024, 4096)],
    }.items():
        print(f"  {name}:")
        for rows, count, context in cases:
            session = model.start_session()
            session.prefill([[7] * context] * rows)

            tokens = torch.full((rows, count), 9)

            def one_pass(session=session, tokens=tokens) -> None:
                session.extend(tokens)
                session.rollback([tokens.shape[1]] * len(tokens))

            size = max(rows, count) if context == 64 else context
            print(f"    {size:5d}: {milliseconds(one_pass):7.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32768, 65536, 131072])
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.alone:
        print(*loss_of(options.alone))
        return
    by_vocabulary(options.vocabularies)
    passes()


if __name__ == "__main__":
    main()
