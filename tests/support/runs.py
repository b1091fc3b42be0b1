"""Tiny runs of align and bench: models and texts on disk, and configurations of them."""

import json
import socket
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench import BenchConfig
from paceline.records import read_jsonl
from paceline.train import AlignConfig
from support.configs import small
from support.data import write_lines
from support.models import tiny_pair
from support.processes import finish, start

_SENTENCES = (
    "the cat sat on the mat and then another cat sat there",
    "in an inn near the river the other man ran in the rain",
    "an answer then came after the thin thread was in the needle",
    "there is nothing in the tin and nothing in the pan",
    "the red hen ran and the other hen ate the grain in the barn",
    "a hat, a pan and a tin; then another and another",
    "when the rain came the men ran in and sat near the fire",
)


def write_pair(folder: Path, *, rounded_to: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """`folder/target` and `folder/draft`, ordinary model directories; `folder/corpus.jsonl`.

    Weights are those of a 16-bit checkpoint, which have a compiled pass where there is a compiler.
    Rounded to float32 they have none: such a pair is several times slower.
    """
    folder.mkdir(exist_ok=True)
    for model, name in zip(tiny_pair(**overrides), ("target", "draft"), strict=True):
        model.hf.to(rounded_to).float().save_pretrained(folder / name)
        assert model.tokenizer is not None
        model.tokenizer.save_pretrained(folder / name)
    write_lines(folder / "corpus.jsonl", *[{"text": text} for text in _SENTENCES])
    return folder


def align_config(folder: Path, output: Path, **changes: Any) -> AlignConfig:
    """Ten steps of four short rows."""
    return small("align", folder, output, **changes)


def held_out(folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a run with evaluation on a little text."""
    corpus = str(folder / "corpus.jsonl")
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    return {"data": {"train": corpus, "held_out": corpus}, "evaluation": small | settings}


def losses(run: Path) -> list[float]:
    """The loss of every step, in order."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


# argv: configurations. Imports take longer than training, so one process imports for both.
_PROCESSES = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from paceline.config import load_config
    from paceline.data.input_checks import checked
    from paceline.train import AlignConfig, align

    checked(load_config(AlignConfig, Path(sys.argv[1])))  # what is imported late is then there
    child = os.fork()
    rank = "0" if child else "1"
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    for config in map(Path, sys.argv[1:]):
        align(load_config(AlignConfig, config), resume=True)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def two_processes(configs: Sequence[AlignConfig], folder: Path) -> None:
    """Run each on the same two processes, with the variables of torchrun."""
    files = [folder / f"config-{number}.json" for number in range(len(configs))]
    for file, config in zip(files, configs, strict=True):
        file.write_text(json.dumps(config.model_dump(mode="json")))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    done = finish(start(_PROCESSES, *files, env=common))
    assert done.returncode == 0, done.stderr


QUESTIONS = [
    {"prompt": f"the {a} sat near the {b}", "completion": f" and then the {b} ran"}
    for a in ("cat", "hen", "man")
    for b in ("inn", "tin", "pan")
]


def bench_config(folder: Path, output: Path, grid: dict[str, Any], **changes: Any) -> BenchConfig:
    """Five examples, of which two are timed."""
    return small("bench", folder, output, grid=grid, **changes)
