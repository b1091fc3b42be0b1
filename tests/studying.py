"""A tiny study: align a pair, measure its drafts on two looks of prompts, and bench them."""

import textwrap
from pathlib import Path
from typing import Any

import yaml

from aligning import write_corpus, write_pair
from paceline.studies.rows import StudyRow

CLOCKS = (
    *("seconds", "first_seconds", "target_seconds", "target_first_seconds"),
    "predicted_decoding_speedup",
)
MODELS = {"target": "$data/target", "draft": "$data/draft"}
WEIGHTS = ["$data/target/model.safetensors", "$data/draft/model.safetensors"]
ALIGNED = "$output/align/draft/model.safetensors"
# The first lines of a program for forked.Program: the stages of a study are copies of it, which
# have its imports at once; command_line() never returns.
STAGES_ARE_COPIES = textwrap.dedent("""
    import fcntl, os, signal, subprocess, sys, traceback
    from pathlib import Path
    from types import SimpleNamespace
    import paceline.cli.main as cli
    import paceline.data.input_checks, paceline.cli.result_tables
    import paceline.studies.session
    from paceline.processes import end_with_parent
    from paceline.studies import execute

    def command_line(*arguments):
        sys.argv = ["paceline", *arguments]
        try:
            cli.main()
        except SystemExit as ending:
            code = ending.code
        except BaseException:
            traceback.print_exc()
            code = 3
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    class Forked(subprocess.Popen):
        '''The process of a stage: a copy of this one, with what Popen does besides.'''

        def __init__(self, command, *, stdout, **_options):
            self._stage, self._log = command[4:], stdout.fileno()
            super().__init__(command)

        def _execute_child(self, *_):
            self.pid = os.fork()
            self._child_created = True
            if self.pid == 0:
                os.setsid()
                os.dup2(self._log, 1)
                os.dup2(self._log, 2)
                os.closerange(3, 256)
                parent, *arguments = self._stage
                end_with_parent(int(parent))
                command_line(*arguments)

    # of this module alone: others start programs
    execute.subprocess = SimpleNamespace(
        Popen=Forked, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired
    )
""")

COST = {"minutes": {"cpu": 0.01, "gpu": 0.01}, "disk_mb": 1}


def write_study(folder: Path, **changes: Any) -> Path:
    """`folder/tiny.yaml`, whose paths are relative to the folder, and its models and texts."""
    write_pair(folder / "data")
    rows = [{"prompt": f"number {number}", "completion": f"{number}"} for number in range(24)]
    write_corpus(folder / "data/prompts.jsonl", rows)
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_study() | changes, sort_keys=False), encoding="utf-8")
    return file


def tiny_study() -> dict[str, Any]:
    return {
        "title": "Tiny",
        "output": "runs/tiny",
        "looks": 2,
        "prepare": "make the tiny models",
        "variables": {"data": "data"},
        "stages": {"align": alignment(), "tau": taus(), "cells": cells()},
    }


def alignment() -> dict[str, Any]:
    """Six steps with a checkpoint after each."""
    return COST | {
        "command": "align",
        "set": MODELS
        | {
            "output": "$output/align",
            "data": {"train": "$data/corpus.jsonl"},
            "num_steps": 6,
            "batch_size": 2,
            "max_prompt_tokens": 5,
            "max_completion_tokens": 11,
            "checkpoints": {"every_steps": 1},
            "optimizer": {"kind": "adamw", "learning_rate": 0.003},
            "precision": "float32",
            "device": "cpu",
        },
        "inputs": [*WEIGHTS, "$data/corpus.jsonl"],
        "outputs": [ALIGNED],
    }


def taus() -> dict[str, Any]:
    """Both drafts on two samplings."""
    return COST | {
        "command": "trajectory",
        "set": {
            "target": "$data/target",
            "runs": ["$output/align"],
            "tasks": {"numbers": "$data/prompts.jsonl"},
            "samplings": [{"temperature": 0}, {"temperature": 1.0}],
            "gammas": [2],
            "num_prompts": 12,
            "max_prompt_tokens": 8,
            "max_new_tokens": 8,
            "output": "$output/tau-$look",
        },
        "inputs": [WEIGHTS[0], ALIGNED, "$data/prompts.jsonl"],
        "outputs": ["$output/tau-$look/rows.jsonl"],
        "covers": ["DistillSpec Table C.1"],
    }


def cells() -> dict[str, Any]:
    """Lossless decoding."""
    return COST | {
        "command": "bench",
        "set": MODELS
        | {
            "task": {
                "task": "pairs",
                "corpus": "$data/prompts.jsonl",
                "metric": "exact_match",
            },
            "grid": {
                "rules": [{"rule": "lossless"}],
                "temperatures": [0],
                "num_speculative_tokens": [2],
            },
            "num_examples": 8,
            "num_timed": 2,
            "max_new_tokens": 6,
            "device": "cpu",
            "output": "$output/cells",
        },
        "inputs": [*WEIGHTS, "$data/prompts.jsonl"],
        "outputs": ["$output/cells/rows.jsonl"],
        "labels": {"pair": "tiny"},
    }


def comparable(rows: list[StudyRow]) -> list[dict[str, Any]]:
    """The rows without clocks and the machine."""

    def untimed(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in CLOCKS}

    return [
        {
            **row.model_dump(mode="json", exclude={"source"}),
            "sums": untimed(row.sums),
            "totals": untimed(row.totals),
            "source": (row.source.stage, row.source.command, row.source.fingerprints),
        }
        for row in rows
    ]
