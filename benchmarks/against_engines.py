"""Compares the latency of Paceline with serving engines, using the same models and cores.

Sends whole greedy requests one at a time. Four configurations are interleaved: engine and Paceline,
each with the target alone and with the draft. The engine runs in separate processes. Prints
milliseconds per token of each configuration, and ratios with 95% intervals over requests.

    paceline export MODEL --to vllm --out exports/target
    paceline export DRAFT --target MODEL --to vllm --out exports/draft
    python benchmarks/against_engines.py --engine vllm --program .engines/vllm/bin/vllm \
        --engine-target exports/target --engine-draft exports/draft \
        --target MODEL --draft DRAFT --prompts FILE

For llama-server, export GGUF files (`--to llamacpp`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Drafting, Request, Setup
from paceline.engines.process import started
from paceline.progress import silent
from pairing import pair_parser, ratio, served_pair, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.decode.decoder import Decoder
    from paceline.engines.contract import Engine

GREEDY = SamplingParams(temperature=0)
METHODS = ("engine alone", "engine with draft", "ours alone", "ours with draft")
Timing = tuple[float, int]  # seconds, number of generated tokens


class Generate(Protocol):
    """Generates `count` tokens after a prompt."""

    def __call__(self, prompt: list[int], count: int, /) -> Timing: ...


def ours(decoder: Decoder, counted: list[tuple[int, int]] | None = None) -> Generate:
    """Greedy requests to a decoder; adds blocks and accepted tokens to `counted`."""

    def generate(prompt: list[int], count: int) -> Timing:
        start = time.perf_counter()
        (generation,) = decoder.generate([prompt], count, eos_token_ids=[])
        seconds = time.perf_counter() - start
        if counted is not None:
            counted.append((generation.stats.num_target_calls, generation.stats.num_accepted))
        return seconds, len(generation.tokens)

    return generate


def served(engine: Engine, counted: list[tuple[int, int]] | None = None) -> Generate:
    """Greedy requests to an engine; adds blocks and accepted tokens to `counted`."""

    def generate(prompt: list[int], count: int) -> Timing:
        answer = engine.serve(Request(prompt, count, GREEDY, 0))
        if counted is not None and answer.blocks is not None:
            counted.append((answer.blocks.num_blocks, answer.blocks.num_accepted))
        return answer.seconds, len(answer.tokens)

    return generate


def start_engine(options: argparse.Namespace, stack: ExitStack) -> tuple[str, list[Generate]]:
    """Name and version of the engine; its target alone, and with the draft."""
    target, draft, gamma = options.engine_target, options.engine_draft, options.gamma
    choice = EngineChoice(
        engine=options.engine, program=options.program, options=tuple(options.option)
    )
    length = options.prompt_tokens + options.new_tokens + gamma + 1
    engines = [
        stack.enter_context(started(choice, Setup(target, one, length, options.dtype), silent))
        for one in (None, Drafting(draft, gamma))
    ]
    return f"{options.engine} {engines[0].version}", [served(engine) for engine in engines]


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--engine", required=True, choices=["vllm", "llamacpp"])
    parser.add_argument("--program", required=True)
    parser.add_argument("--engine-target", required=True)
    parser.add_argument("--engine-draft", required=True)
    parser.add_argument(
        "--option", action="append", default=[], help="option of the engine's server"
    )
    parser.add_argument("--dtype", default="bfloat16", help="data type of the engine's weights")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--pause",
        type=float,
        default=0.1,
        help="seconds between requests, for idle threads to sleep",
    )
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    decoders: list[Decoder] = [
        AutoregressiveDecoder(target, sampling=GREEDY),
        SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=GREEDY),
    ]
    with ExitStack() as stack:
        name, theirs = start_engine(options, stack)
        methods = [*theirs, *map(ours, decoders)]
        spent = interleaved(
            methods, prompts[: options.num_prompts], options.new_tokens, options.pause
        )
    rows = zip(METHODS, spent, strict=True)
    print(f"{name}, gamma {options.gamma}")
    print(", ".join(f"{label} {1e3 * sum(row) / len(row):.2f} ms per token" for label, row in rows))
    for pair, found in ratios(spent).items():
        print(f"{pair:35} {show(found)}")


def interleaved(
    methods: Sequence[Generate], prompts: Sequence[list[int]], count: int, pause: float
) -> list[list[float]]:
    """Seconds per token of each method at each prompt; the order rotates from prompt to prompt."""
    for generate in methods:
        generate(prompts[0], count)
    spent: list[list[float]] = [[] for _ in methods]
    for number, prompt in enumerate(prompts):
        for offset in range(len(methods)):
            index = (offset + number) % len(methods)
            time.sleep(pause)
            seconds, tokens = methods[index](prompt, count)
            spent[index].append(seconds / tokens)
    return spent


def ratios(spent: Sequence[Sequence[float]]) -> dict[str, Interval]:
    """What is compared, from the seconds of `METHODS`."""
    pairs = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 3))
    return {f"{METHODS[a]} / {METHODS[b]}": ratio(spent[a], spent[b]) for a, b in pairs}


if __name__ == "__main__":
    main()
