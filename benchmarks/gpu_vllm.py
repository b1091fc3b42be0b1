"""The part of gpu.py that compares requests with those of vLLM."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from against_engines import GREEDY, METHODS, interleaved, ours, ratios, served
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Drafting, Setup
from paceline.engines.process import started
from paceline.errors import EngineError
from paceline.progress import silent
from pairing import made_prompts, show

if TYPE_CHECKING:
    import argparse

    from gpu import Pair, Results
    from paceline.engines.contract import Engine

_ROOT = Path(__file__).resolve().parents[1]


def find_vllm(given: str | None) -> str | None:
    """The program: the given one, else beside this Python, on the PATH, or of `make vllm`."""
    beside = (Path(sys.executable).with_name("vllm"), "vllm", _ROOT / ".engines/vllm/bin/vllm")
    places = beside if given is None else (given,)
    return next((found for place in places if (found := shutil.which(str(place)))), None)


def fault_of_vllm(options: argparse.Namespace) -> str | None:
    """Why vLLM cannot be compared with; None if it can."""
    if find_vllm(options.vllm) is not None:
        return None
    return f"no program {options.vllm or 'vllm'}; give --vllm PROGRAM, or make vllm"


def report_vllm(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Compare greedy requests with those of vLLM, which loads the same weights by itself."""
    target, draft = pair.ready
    assert draft is not None, "vLLM is compared with the draft and without it"
    prompts = made_prompts(options.num_prompts, target.vocab_size)
    counts: dict[str, list[tuple[int, int]]] = {"engine": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        alone, drafting = start_vllm(pair, Path(folder), options, stack)
        speculative = SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=GREEDY)
        methods = (
            served(alone),
            served(drafting, counts["engine"]),
            ours(AutoregressiveDecoder(target, GREEDY)),
            ours(speculative, counts["ours"]),
        )
        # threads of a server on the same cores need a second to sleep
        pause = 1.0 if options.device == "cpu" else 0.1
        spent = interleaved(methods, prompts, options.new_tokens, pause)
    at = {"vllm": alone.version}
    for name, per_token in zip(METHODS, spent, strict=True):
        results.add(pair.name, f"{name}, tokens/s", len(prompts) / sum(per_token), **at)
    for name, found in ratios(spent).items():
        results.add(pair.name, name, found.value, show(found), **at)
    for name, counted in counts.items():
        blocks, accepted = map(sum, zip(*counted, strict=True))
        results.add(pair.name, f"{name}, 1 + accepted / blocks", 1 + accepted / blocks, **at)


def start_vllm(
    pair: Pair, folder: Path, options: argparse.Namespace, stack: ExitStack
) -> list[Engine]:
    """Servers of the target alone and with the draft."""
    setting: tuple[str, ...] = ("--skip-tokenizer-init", "--no-enable-prefix-caching")
    # With this much for keys and values, vLLM does not measure what is free, which would fail
    # while another program allocates. The fraction is then only the least that has to be free.
    setting += ("--kv-cache-memory-bytes", str(2**30), "--gpu-memory-utilization", "0.1")
    gpu = None
    if options.device == "cpu":
        setting += ("--enforce-eager",)
    else:
        gpu = torch.device(options.device).index or 0
        gc.collect()
        torch.cuda.empty_cache()  # leaves the servers what our models do not need
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        card = visible.split(",")[gpu] if visible else str(gpu)
        stack.enter_context(patch.dict(os.environ, CUDA_VISIBLE_DEVICES=card))  # of the servers
    choice = EngineChoice(
        engine="vllm", program=find_vllm(options.vllm), options=setting, start_seconds=300
    )
    length = 64 + options.new_tokens + options.gamma + 1
    paths = [str(folder / role) for role in ("target", "draft")]
    for model, path in zip(pair.plain, paths, strict=True):
        assert model is not None, "as in report_vllm"
        model.hf.save_pretrained(path)

    def start(drafting: Drafting | None) -> Engine:
        setup = Setup(paths[0], drafting, length, "bfloat16")
        return stack.enter_context(started(choice, setup, silent))

    free = 0 if gpu is None else torch.cuda.mem_get_info(gpu)[0]
    servers = [start(drafting) for drafting in (None, Drafting(paths[1], options.gamma))]
    if gpu is not None and free - torch.cuda.mem_get_info(gpu)[0] < 2**30:  # of keys and values
        raise EngineError(f"{choice.program} does not use the card; give --vllm a build for CUDA")
    return servers
