"""What does a compiled pass over n tokens cost, as a multiple of a pass over one token, on each kind of x86 processor?

No files are needed: random weights in the shape of SmolLM2-135M, 64 tokens of context. Every level that this processor
has is measured in a process of its own. The library is compiled without the instructions of higher levels, and
torch's libraries are limited by their own environment variables. Within a process the passes are interleaved.

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
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.models.causal import CausalModel
from paceline.models.causal_session import CausalSession
from paceline.models.int8 import rounded_copy
from paceline.models.kernels import EXACT, Packer
from paceline.models.llama import LlamaDecoder
from paceline.models.native_llama import NativeLlama
from paceline.native.compilation import library_with
from pairing import paired_seconds, ratio, show

CONTEXT = 64
_NO_TILES = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16", "-mno-avx512fp16")
_NO_512 = tuple(
    f"-mno-avx512{part}"
    for part in [
        "f",
        "bw",
        "dq",
        "vl",
        "cd",
        "bf16",
        "vnni",
        "vbmi",
        "vbmi2",
        "ifma",
        "bitalg",
        "vpopcntdq",
    ]
)
# By level: what the processor must have, what the compiler leaves out, and what torch's libraries may use.
LEVELS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "avx2": (
        "avx2",
        (*_NO_TILES, *_NO_512, "-mno-avxvnni"),
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "avx512": (
        "avx512f",
        (*_NO_TILES, "-mno-avx512bf16"),
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    "amx": ("amx_tile", (), {}),
}


def has(flag: str) -> bool:
    return f" {flag} " in Path("/proc/cpuinfo").read_text(encoding="utf-8").replace("\n", " ")


def session_of(hf: LlamaForCausalLM, flags: tuple[str, ...], *, int8: bool) -> CausalSession:
    library = library_with(flags)
    assert library.may_multiply(), "the kernel gives no room for tiles"
    through_torch = rounded_copy(hf) if int8 else hf
    decoder = LlamaDecoder(through_torch, Packer(EXACT), compiled=False)
    decoder.native = NativeLlama(hf, None, int8=int8, library=library)
    session = CausalSession(CausalModel(through_torch, None, decoder))
    session.prefill([[7] * CONTEXT])
    return session


@torch.inference_mode()
def measure(level: str, counts: list[int], rounds: int) -> None:
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

    def read(_: int, session: CausalSession, tokens: torch.Tensor) -> None:
        session.extend(tokens)
        session.rollback([tokens.shape[1]])

    for weights in ("bfloat16", "int8"):
        session = session_of(hf, LEVELS[level][1], int8=weights == "int8")
        runs = [
            functools.partial(read, session=session, tokens=torch.full((1, count), 9))
            for count in counts
        ]
        paired_seconds(runs, 2)
        spent = paired_seconds(runs, rounds)
        for count, seconds in zip(counts, spent, strict=True):
            milliseconds = 1000 * statistics.median(seconds)
            print(
                f"{level:7} {weights:8} {count:4} tokens: {milliseconds:6.1f} ms, "
                f"{show(ratio(seconds, spent[0]))} of {counts[0]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    counts = [1, 2, 4, 5, 8, 9, 12, 16, 24, 32, 64]
    parser.add_argument("--tokens", type=int, nargs="+", default=counts)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", choices=LEVELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        measure(options.alone, options.tokens, options.rounds)
        return
    for level in options.levels:
        if not has(LEVELS[level][0]):
            print(f"{level:7} this processor does not have it")
            continue
        command = [sys.executable, __file__, "--alone", level, "--rounds", str(options.rounds)]
        command += ["--tokens", *map(str, options.tokens)]
        subprocess.run(command, check=True, env={**os.environ, **LEVELS[level][2]})


if __name__ == "__main__":
    main()
