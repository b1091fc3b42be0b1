"""Compares decoding with and without a draft to llama.cpp's plain decoding of the same model.

llama.cpp uses the 4-bit weights of the .gguf file. Paceline converts them to bfloat16, or to int8
with a scale per row. Both decode greedily with the same number of threads and are timed after the
first token. Prompts are interleaved; llama.cpp runs in a separate process. Prints milliseconds per
token and ratios with 95% intervals. With int8 weights it also prints the quantization error: the
TVD to the unquantized target, and both perplexities on the prompts' texts.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python==0.3.36
    python benchmarks/decode_vs_llama_cpp.py --target FILE.gguf --draft DRAFT --prompts FILE
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from typing import TYPE_CHECKING

import torch

from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.latency import time_request
from paceline.models import load_model, prepare_for_decoding
from pairing import ratio, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from paceline.decode.decoder import Decoder
    from paceline.models import CausalModel

GREEDY = SamplingParams(temperature=0)


class LlamaCpp:
    """llama.cpp in a separate process, since idle threads of two libraries slow each other down."""

    def __init__(self, path: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=serve_llama_cpp, args=(theirs, path, threads), daemon=True)
        process.start()
        self.name: str = self._pipe.recv()

    def seconds_per_token(self, prompt: Sequence[int], num_tokens: int) -> float:
        self._pipe.send((list(prompt), num_tokens))
        seconds: float = self._pipe.recv()
        time.sleep(0.05)  # lets the worker's threads go to sleep
        return seconds


def serve_llama_cpp(pipe: Connection, path: str, threads: int) -> None:
    """Decode greedily and send the seconds per token after the first."""
    import llama_cpp
    import numpy

    model = llama_cpp.Llama(
        path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    vocab_size = model.n_vocab()
    info = llama_cpp.llama_print_system_info().decode()
    pipe.send(f"llama-cpp-python {llama_cpp.__version__} ({info.strip(' |')})")
    while True:
        try:
            prompt, num_tokens = pipe.recv()
        except EOFError:  # the parent process has ended
            return
        time.sleep(0.05)  # lets the parent's threads go to sleep
        model.reset()
        model.eval(prompt)
        started = time.perf_counter()
        for _ in range(num_tokens - 1):
            logits = llama_cpp.llama_get_logits(model.ctx)
            model.eval([int(numpy.ctypeslib.as_array(logits, (vocab_size,)).argmax())])
        pipe.send((time.perf_counter() - started) / (num_tokens - 1))


def our_seconds_per_token(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> float:
    times = time_request(decoder, prompt, num_tokens, 0).times
    return (times.seconds - times.first_seconds) / (times.num_tokens - 1)


@torch.inference_mode()
def quantization_error(
    original: CausalModel, quantized: CausalModel, texts: Sequence[list[int]]
) -> str:
    """Mean TVD between the two over the texts' tokens, and the perplexity of each."""
    moved, surprise, count = 0.0, [0.0, 0.0], 0
    for text in texts:
        tokens = torch.tensor([text])
        logs = [
            model.hf(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            for model in (original, quantized)
        ]
        moved += 0.5 * float((logs[0].exp() - logs[1].exp()).abs().sum())
        for which, log_probs in enumerate(logs):
            surprise[which] -= float(log_probs.gather(-1, tokens[0, 1:, None]).sum())
        count += len(text) - 1
    before, after = (math.exp(total / count) for total in surprise)
    return f"TVD {moved / count:.4f}, perplexity {before:.2f} -> {after:.2f} over {count} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="a .gguf file")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--target-weights", choices=["auto", "int8"], default="auto")
    options = parser.parse_args()
    loaded = load_model(options.target)
    target = prepare_for_decoding(loaded, options.target_weights)
    draft = prepare_for_decoding(load_model(options.draft), "int8")
    theirs = LlamaCpp(options.target, torch.get_num_threads())
    ours: list[Decoder] = [
        AutoregressiveDecoder(target, sampling=GREEDY),
        SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=GREEDY),
    ]
    assert loaded.tokenizer is not None
    texts = read_prompts(options.prompts, loaded.tokenizer, max_tokens=256)[: options.num_prompts]
    prompts = [text[: options.prompt_tokens] for text in texts]
    methods = [
        theirs.seconds_per_token,
        *(
            lambda prompt, count, decoder=decoder: our_seconds_per_token(decoder, prompt, count)
            for decoder in ours
        ),
    ]
    for method in methods:
        method(prompts[0], 16)
    seconds: list[list[float]] = [[] for _ in methods]
    for number, prompt in enumerate(prompts):
        for offset in range(len(methods)):
            index = (offset + number) % len(methods)
            seconds[index].append(methods[index](prompt, options.new_tokens))
    llama, alone, pair = seconds
    names = ("llama.cpp", "ours alone", "ours with draft")
    means = ", ".join(
        f"{name} {1000 * sum(spent) / len(spent):.2f} ms per token"
        for name, spent in zip(names, seconds, strict=True)
    )
    print(f"{theirs.name}; our target's weights: {options.target_weights}\n{means}")
    print(f"llama.cpp / ours alone      {show(ratio(llama, alone))}")
    print(f"llama.cpp / ours with draft {show(ratio(llama, pair))}  (gamma {options.gamma})")
    if options.target_weights == "int8":
        print(f"int8 target: {quantization_error(loaded, target, texts)}")


if __name__ == "__main__":
    main()
