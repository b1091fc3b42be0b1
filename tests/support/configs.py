"""A small configuration of every command, over the files of `support.runs.write_pair`."""

from pathlib import Path
from typing import Any

from paceline.cli.main import schema_of

_FLOAT32 = {"dtype": "float32", "device": "cpu"}
_FEW = {"num_prompts": 4, "max_prompt_tokens": 6, "max_new_tokens": 10}
_STEPS = {"batch_size": 4, "precision": "float32", "device": "cpu"}
_LLAMA = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


def small(kind: str, folder: Path, output: Path, **changes: Any) -> Any:
    """The configuration of `paceline kind`, float32 on the CPU, with these changes."""
    target, draft, corpus = (str(folder / name) for name in ("target", "draft", "corpus.jsonl"))
    pair = {"target": target, "draft": draft}
    task = {"task": "pairs", "corpus": str(folder / "questions.jsonl"), "metric": "rouge1"}
    written = {"output": str(output)}
    server = {"kind": "openai", "url": "http://127.0.0.1:1", "patience_s": 0.1}
    values: dict[str, dict[str, Any]] = {
        "decode": {},
        "draft": {"target": target, "out": str(output), "layers": [0]},
        "export": {"model": target, "to": "transformers", "out": str(output)},
        "align": pair
        | written
        | _STEPS
        | {"data": {"train": corpus}, "num_steps": 10}
        | {"max_prompt_tokens": 5, "max_completion_tokens": 11}
        | {"optimizer": {"kind": "adamw", "learning_rate": 3e-3}},
        "pretrain": written
        | _STEPS
        | {"model": _LLAMA, "data": {"train": corpus}, "num_steps": 8}
        | {"max_prompt_tokens": 8, "max_completion_tokens": 8},
        "generate-data": {"target": target, "prompts": corpus, "dtype": "float32"}
        | written
        | {"max_prompt_tokens": 8, "max_new_tokens": 12, "batch_size": 3, "shard_size": 4},
        # five examples, of which two are timed
        "bench": pair
        | written
        | _FLOAT32
        | {"task": task, "num_examples": 5, "num_timed": 2, "max_new_tokens": 9},
        "tune": pair
        | written
        | _FLOAT32
        | {"task": task, "num_examples": 4, "num_confirmed": 8, "num_timed": 3}
        | {"quality_floor": 0.9},
        "score": written | {"task": task, "tokenizer": target, "writer": server},
        "measure": pair | _FLOAT32 | _FEW | {"prompts": corpus},
        "measure-engine": pair | {"prompts": corpus, "engine": {"engine": "vllm"}},
        "measure-speculative-config": pair
        | {"prompts": corpus, "engine": {"engine": "vllm"}}
        | {"speculative_config": ['{"method": "ngram", "num_speculative_tokens": 4}']},
        "verify": pair | _FLOAT32 | {"prompts": corpus, "num_prompts": 4},
        "analyze": pair | {"prompts": corpus},
        "perplexity": {"model": target, "text": corpus},
        "follow": pair | written | {"log": corpus, "align": {"num_steps": 1}},
        "trajectory": {"target": target, "runs": [str(folder / "run")]}
        | (written | _FEW | {"tasks": {"text": corpus}}),
    }
    return schema_of(kind)(**values[kind] | changes)
