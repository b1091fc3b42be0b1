"""Is decoding with an aligned draft faster than llama.cpp's plain decoding of the same model on the same cores?

llama.cpp reads the .gguf file as it is, with its 4-bit weights; ours reads the file's weights as bfloat16, or rounded to 8 bits a row, alone and with the draft.
Both are timed from the first token on, on as many threads, prompt by prompt in turn, greedy; llama.cpp in a process of its own. Prints milliseconds a token and the ratios with their
intervals; for 8-bit weights also what the rounding costs: how far it moves the distributions of the target on the prompts'
texts, and their perplexity.

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
    """In a process of its own: the threads of two libraries, waiting for work, hinder each other."""

    def __init__(self, path: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=serve_llama_cpp, args=(theirs, path, threads), daemon=True)
        process.start()
        self.name: str = self._pipe.recv()

    def seconds_a_token(self, prompt: Sequence[int], num_tokens: int) -> float:
        self._pipe.send((list(prompt), num_tokens))
        seconds: float = self._pipe.recv()
        time.sleep(0.05)  # its threads go to sleep
        return seconds


def serve_llama_cpp(pipe: Connection, path: str, threads: int) -> None:
    """Greedy decoding; answers with seconds of a token behind the first."""
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
        except EOFError:  # who asked has gone
            return
        time.sleep(0.05)  # so do the threads of who asked
        model.reset()
        model.eval(prompt)
        started = time.perf_counter()
        for _ in range(num_tokens - 1):
            logits = llama_cpp.llama_get_logits(model.ctx)
            model.eval([int(numpy.ctypeslib.as_array(logits, (vocab_size,)).argmax())])
        pipe.send((time.perf_counter() - started) / (num_tokens - 1))


def our_seconds_a_token(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> float:
    first_s, all_s, blocks = time_request(decoder, prompt, num_tokens, 0)
    return (all_s - first_s) / (sum(len(block.tokens) for block in blocks) - 1)


@torch.inference_mode()
def cost_of_rounding(whole: CausalModel, rounded: CausalModel, texts: Sequence[list[int]]) -> str:
    """TVD between the two, and the perplexity of either, a mean over the texts' tokens."""
    moved, surprise, count = 0.0, [0.0, 0.0], 0
    for text in texts:
        tokens = torch.tensor([text])
        logs = [
            model.hf(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            for model in (whole, rounded)
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
    ways = [
        theirs.seconds_a_token,
        *(
            lambda prompt, count, decoder=decoder: our_seconds_a_token(decoder, prompt, count)
            for decoder in ours
        ),
    ]
    for way in ways:
        way(prompts[0], 16)
    seconds: list[list[float]] = [[] for _ in ways]
    for number, prompt in enumerate(prompts):
        for place in range(len(ways)):
            which = (place + number) % len(ways)
            seconds[which].append(ways[which](prompt, options.new_tokens))
    llama, alone, pair = seconds
    a_token = ", ".join(
        f"{name} {1000 * sum(spent) / len(spent):.2f} ms a token"
        for name, spent in zip(("llama.cpp", "ours alone", "with the draft"), seconds, strict=True)
    )
    print(f"{theirs.name}; our target's weights: {options.target_weights}\n{a_token}")
    print(f"llama.cpp / ours alone     {show(ratio(llama, alone))}")
    print(f"llama.cpp / with the draft {show(ratio(llama, pair))}  (gamma {options.gamma})")
    if options.target_weights == "int8":
        print(f"rounding the target to 8 bits: {cost_of_rounding(loaded, target, texts)}")


if __name__ == "__main__":
    main()
