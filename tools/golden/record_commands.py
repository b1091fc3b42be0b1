"""What the commands write and print, on tiny models."""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml
from record_models import digest
from safetensors.torch import load_file, save_file

from paceline.cli.main import main
from support.runs import write_pair

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"


# commands


def run(*arguments: Any, code: int | None = 0) -> Any:
    """What a command prints with --json, or its exit code."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["paceline", *map(str, arguments)]
    got = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ending:
        got = ending.code
    if code is not None and got != code:
        raise RuntimeError(
            f"{' '.join(sys.argv)}: exit code {got}\n{out.getvalue()}\n{err.getvalue()}"
        )
    if "--json" in arguments:
        return json.loads(out.getvalue())
    return {"exit_code": got} if code is not None else {}


def files(folder: Path) -> dict[str, Any]:
    """Result files of a run: records as they are, weights and other files as digests."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if (
            path.is_dir()
            or "checkpoints" in name
            or path.suffix in (".lock", ".png", ".md", ".gguf")
        ):
            continue
        if path.suffix == ".safetensors":
            found[name] = {key: digest(value) for key, value in sorted(load_file(path).items())}
        elif path.suffix == ".parquet":
            found[name] = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            found[name] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        elif path.suffix == ".json" and "tokenizer" not in name:
            found[name] = json.loads(path.read_text("utf-8"))
        elif path.suffix == ".yaml":
            found[name] = yaml.safe_load(path.read_text("utf-8"))
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def round_weights(path: Path) -> None:
    """To what bfloat16 holds: then decoding takes the compiled pass."""
    weights = {name: weight.bfloat16().float() for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def sets(**values: Any) -> list[str]:
    """`--set` options; __ stands for a dot."""
    options: list[str] = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += ["--set", f"{key.replace('__', '.')}={text}"]
    return options


CPU = ["--set", "device=cpu"]
SMALL = sets(num_prompts=6, max_prompt_tokens=6, max_new_tokens=12)


def reading_commands() -> dict[str, Any]:
    """Commands that look at a pair."""
    write_pair(Path("pair"))
    for name in ("target", "draft"):
        round_weights(Path("pair") / name / "model.safetensors")
    pair = ["--target", "pair/target", "--draft", "pair/draft"]
    prompts = ["--prompts", "pair/corpus.jsonl"]
    timed = sets(gammas=[1, 2], pass_repeats=1)
    found: dict[str, Any] = {
        "measure": run(
            "measure", *pair, *prompts, *SMALL, *timed, "--json", *sets(timed_prompts=2), code=None
        ),
        "measure greedy": run(
            "measure",
            *pair,
            *prompts,
            *SMALL,
            *timed,
            "--json",
            "--temperature",
            "0",
            "--draft-temperature",
            "0",
            *sets(timed_prompts=2),
            code=None,
        ),
        "measure engine": run(
            "measure",
            "--engine",
            "transformers",
            *pair,
            *prompts,
            *SMALL,
            "--temperature",
            "0",
            "--json",
            *sets(num_speculative_tokens=2),
            code=None,
        ),
        "analyze": run("analyze", *pair, *prompts, *SMALL, *timed, "--json"),
        "analyze draft text": run(
            "analyze",
            *pair,
            *prompts,
            *SMALL,
            *timed,
            "--json",
            *sets(text="draft", sampling__temperature=0.7),
        ),
        "verify": run("verify", *pair, *prompts, "--json", "--self-test"),
        "verify batch": run("verify", *pair, *prompts, "--json", *sets(batch_size=3)),
    }
    return found | decoding_commands() | exports()


def decoding_commands() -> dict[str, Any]:
    pair = ["--target", "pair/target", "--draft", "pair/draft"]
    found: dict[str, Any] = {}
    asked = ["--prompt", "the cat sat on", "--max-new-tokens", "12", "--json"]
    for name, more in {
        "greedy": ["--temperature", "0"],
        "drawn": ["--temperature", "0.8", "--seed", "3", "--top-p", "0.9"],
        "rule": sets(strategy__rule={"rule": "token_v3", "alpha": 0.4}),
        "big_little": sets(strategy={"strategy": "big_little", "fallback": 0.2, "rollback": 2.0}),
    }.items():
        found[f"decode {name}"] = run("decode", *pair, *asked, *more)
    found["decode alone"] = run("decode", *pair[:2], *asked)
    return found


def exports() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for to in ("transformers", "vllm", "sglang", "llamacpp"):
        out = Path(f"export-{to}")
        run("export", "pair/draft", "--target", "pair/target", "--to", to, "--out", out, code=None)
        found[f"export {to}"] = files(out) if out.exists() else None
    return found


def making_commands() -> dict[str, Any]:
    """Commands that make models and data: drafts, pretraining, alignment, generated text."""
    corpus = "pair/corpus.jsonl"
    target = ["--target", "pair/target"]
    made = {
        "layers": ["--layers", "0,3"],
        "params": ["--params", "0.4"],
        "vocabulary": ["--layers", "0,3", "--vocabulary", "80", "--text", corpus],
        "subclone": ["--layers", "0,3", "--text", corpus, *sets(hidden_size=16, num_heads=2)],
    }
    found: dict[str, Any] = {}
    for name, how in made.items():
        run("draft", *target, *how, "--out", f"draft-{name}")
        found[f"draft {name}"] = files(Path(f"draft-{name}"))
    data = ["--target", "pair/target", "--prompts", corpus]
    small = sets(max_new_tokens=10, max_prompt_tokens=6, batch_size=4)
    run("generate-data", *data, "--output", "data", *small, *sets(shard_size=8))
    run("generate-data", *data, "--output", "data-drafted", *small, *sets(draft="pair/draft"))
    found["data"], found["data drafted"] = files(Path("data")), files(Path("data-drafted"))
    return found | alignments()


def alignments() -> dict[str, Any]:
    found: dict[str, Any] = {}
    corpus = "pair/corpus.jsonl"
    pair = ["--target", "pair/target", "--draft", "pair/draft"]
    texts = sets(data__train=corpus, data__held_out=corpus)
    few = sets(
        num_steps=4,
        batch_size=4,
        max_prompt_tokens=5,
        max_completion_tokens=9,
        evaluation={"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 6},
    )
    aligned = {
        "smoke": ["--config", SMOKE / "align.yaml", *texts],
        "mixed": ["--config", SMOKE / "align_mixed.yaml", *texts, *sets(num_steps=5)],
        "gkd": ["--recipe", "gkd", *texts, *few],
        "rule": [
            *texts,
            *few,
            *sets(
                objective=[{"rule": {"rule": "opt", "alpha": 0.2}}],
                evaluation__rule={"rule": "opt", "alpha": 0.2},
            ),
        ],
        "tvd_plus_plus": [
            *texts,
            *few,
            *sets(objective={"kind": "tvd_plus_plus", "estimator": "sampled"}),
        ],
        "rounds": [*texts, *few, *sets(fixed_fraction=0.0, target_rounds={"rows": 8, "uses": 2})],
        "kept": [*texts, *few, *sets(data__keep_states_gb=0.1)],
        "finish": [*texts, *few, *sets(objective="jsd", finish={"objective": "tvd", "begin": 0.5})],
        "cross_entropy": [*texts, *few, *sets(objective="cross_entropy")],
        "loss_vocabulary": [*texts, *few, *sets(loss_vocabulary={"drawn": 30, "frequent": 20})],
        "frozen": [*texts, *few, *sets(freeze_layers=1, freeze_embeddings=True)],
    }
    for name, how in aligned.items():
        run("align", *pair, *how, *CPU, "--output", f"align-{name}", *sets(precision="float32"))
        found[f"align {name}"] = files(Path(f"align-{name}"))
    return found


def benches() -> dict[str, Any]:
    """Pretraining, tasks, grids, tuning and trajectories."""
    found: dict[str, Any] = {}
    for split, count in (("train", 300), ("test", 40)):
        run(
            "task",
            "arithmetic",
            "--split",
            split,
            "--count",
            count,
            "--out",
            f"{split}.jsonl",
            *sets(min_terms=3, max_terms=3, max_digits=1),
        )
    found["task"] = Path("test.jsonl").read_text("utf-8").splitlines()
    for name in ("target", "draft"):
        run(
            "pretrain",
            "--config",
            SMOKE / f"pretrain_{name}.yaml",
            *CPU,
            *sets(precision="float32"),
        )
        found[f"pretrain {name}"] = files(Path("runs") / name)
    run("bench", "--config", SMOKE / "bench.yaml", *CPU)
    found["bench"] = files(Path("runs/bench"))
    run("report", "runs/bench")
    run("tune", "--config", SMOKE / "tune.yaml", *CPU, code=None)
    found["tune"] = files(Path("runs/tune"))
    found["trajectory"] = trajectory()
    return found


def trajectory() -> dict[str, Any]:
    run(
        "trajectory",
        *("--target", "pair/target", "--run", "align-smoke", "--output", "runs/trajectory"),
        *sets(tasks={"text": "pair/corpus.jsonl"}, num_prompts=4, max_new_tokens=8, gammas=[2]),
    )
    return files(Path("runs/trajectory"))
