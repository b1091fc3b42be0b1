"""Is our decoder slower than the engines that serve, with the same models on the same cores?

Whole requests, greedy, one at a time: the engine alone and with the draft, ours alone and with the draft, in turns. The engine runs in
processes of its own. Prints milliseconds a token of the four ways, and ratios with their intervals over requests.

    paceline export MODEL --to vllm --out exports/target; paceline export DRAFT --target MODEL --to vllm --out exports/draft
    python benchmarks/against_engines.py --engine vllm --program .engines/vllm/bin/vllm --engine-target exports/target \
        --engine-draft exports/draft --target MODEL --draft DRAFT --prompts FILE

For llama-server the exports are GGUF files (`--to llamacpp`). For OpenVINO GenAI the program is the python of an environment of its own:

    pip install torch openvino-genai==2026.4.1 optimum-intel==2.2.0; pip uninstall torchvision
    optimum-cli export openvino -m exports/target --task text-generation-with-past --weight-format fp16 openvino/target
"""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.commands import Drafting, Room
from paceline.engines.contract import Request
from paceline.engines.engine_choice import EngineChoice, Setup
from paceline.engines.start import started
from paceline.progress import silent
from pairing import pair_parser, ratio, served_pair, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from paceline.decode.decoder import Decoder
    from paceline.engines.contract import Engine

GREEDY = SamplingParams(temperature=0)
Spent = tuple[float, int]


class Way(Protocol):
    """Answers a prompt; seconds, and how many tokens came."""

    def __call__(self, prompt: list[int], count: int, /) -> Spent: ...


def ours(decoder: Decoder) -> Way:
    def way(prompt: list[int], count: int) -> Spent:
        start = time.perf_counter()
        (generation,) = decoder.generate([prompt], count, eos_token_ids=[])
        return time.perf_counter() - start, len(generation.tokens)

    return way


def served(engine: Engine) -> Way:
    def way(prompt: list[int], count: int) -> Spent:
        answer = engine.serve(Request(prompt, count, GREEDY, 0))
        return answer.seconds, len(answer.tokens)

    return way


class OpenVino:
    """OpenVINO GenAI in a process of its own, asked by lines of JSON."""

    def __init__(self, python: str, target: str, draft: str | None, gamma: int) -> None:
        script = str(Path(__file__).with_name("openvino_worker.py"))
        given = [target, str(gamma), *([draft] if draft else [])]
        self._process = subprocess.Popen(
            [python, script, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._read()["version"]

    def __call__(self, prompt: list[int], count: int) -> Spent:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "count": count}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer["seconds"], answer["count"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def engine_ways(options: argparse.Namespace, stack: ExitStack) -> tuple[str, list[Way]]:
    """The engine's name and version; alone, and with the draft."""
    target, draft, gamma = options.engine_target, options.engine_draft, options.gamma
    if options.engine == "openvino":
        workers = [OpenVino(options.program, target, one, gamma) for one in (None, draft)]
        for worker in workers:
            stack.callback(worker.close)
        return f"OpenVINO GenAI {workers[0].version}", [*workers]
    choice = EngineChoice(
        engine=options.engine, program=options.program, options=tuple(options.option)
    )
    room = Room(options.prompt_tokens + options.new_tokens + gamma + 1)
    engines = [
        stack.enter_context(started(choice, Setup(target, one, room, options.dtype), silent))
        for one in (None, Drafting(draft, gamma))
    ]
    return f"{options.engine} {engines[0].version}", [served(engine) for engine in engines]


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--engine", required=True, choices=["vllm", "llamacpp", "openvino"])
    parser.add_argument("--program", required=True)
    parser.add_argument("--engine-target", required=True)
    parser.add_argument("--engine-draft", required=True)
    parser.add_argument("--option", action="append", default=[], help="of the engine's server")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds for threads to fall asleep"
    )
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    decoders: list[Decoder] = [
        AutoregressiveDecoder(target, sampling=GREEDY),
        SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=GREEDY),
    ]
    with ExitStack() as stack:
        name, theirs = engine_ways(options, stack)
        ways = [*theirs, *map(ours, decoders)]
        spent = in_turns(ways, prompts[: options.num_prompts], options.new_tokens, options.pause)
    told = zip(("alone", "with the draft", "ours alone", "ours with the draft"), spent, strict=True)
    print(f"{name}, gamma {options.gamma}")
    print(", ".join(f"{which} {1e3 * sum(row) / len(row):.2f} ms a token" for which, row in told))
    print(f"its alone / with the draft        {show(ratio(spent[0], spent[1]))}")
    print(f"ours alone / with the draft       {show(ratio(spent[2], spent[3]))}")
    print(f"its / ours, both alone            {show(ratio(spent[0], spent[2]))}")
    print(f"its / ours, both with the draft   {show(ratio(spent[1], spent[3]))}")
    print(f"its alone / ours with the draft   {show(ratio(spent[0], spent[3]))}")


def in_turns(
    ways: Sequence[Way], prompts: Sequence[list[int]], count: int, pause: float
) -> list[list[float]]:
    """Seconds a token of each way at each prompt, the first to go changing every time."""
    for way in ways:
        way(prompts[0], count)
    spent: list[list[float]] = [[] for _ in ways]
    for number, prompt in enumerate(prompts):
        for place in range(len(ways)):
            which = (place + number) % len(ways)
            time.sleep(pause)
            seconds, tokens = ways[which](prompt, count)
            spent[which].append(seconds / tokens)
    return spent


if __name__ == "__main__":
    main()
