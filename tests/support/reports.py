"""Small runs of every kind, written by hand as their commands would: what reports are made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core.rules import Chow, Lossless, Opt
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.results.row import Row, Source
from paceline.results.row import write_rows as write_result_rows
from support.results import ALONE, example, row, write_rows

ENVIRONMENT = {"versions": {"paceline": "0.1.0"}, "processor": "a processor", "cpu_count": 2}


def interval(value: float, half: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def write_json(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def manifest(folder: Path, kind: str, **config: Any) -> None:
    content = {"kind": kind, "config": config, "environment": ENVIRONMENT}
    write_json(folder / "manifest.json", content)


def bench_run(folder: Path) -> Path:
    """Two families; times and scores differ between the examples."""

    def cell(rule: Any, speedup: float, misses: int, rejected: int):
        examples = [
            example(
                0.0 if place < misses else 1.0,
                (1 + place / 40) / speedup,
                baseline_s=1 + place / 40,
                examined=10,
                rejected=rejected,
                calls=10 - rejected,
            )
            for place in range(24)
        ]
        return row(rule, examples)

    cells = [
        cell(ALONE, 1.0, 4, 0),
        cell(Lossless(), 1.3, 4, 4),
        cell(Opt(0.2), 1.5, 7, 3),
        cell(Opt(0.4), 1.7, 9, 2),
        cell(Chow(0.2), 1.4, 6, 3),
        row(Chow(0.9), error="ran out of memory"),
    ]
    write_rows(folder, cells)
    task = {"task": "arithmetic"}
    manifest(folder, "Bench", target="models/target", draft="models/draft", task=task, seed=0)
    return folder


def _measured(units: int, setting: dict[str, Any], **sums: list[float]) -> dict[str, Any]:
    totals = {"target_pass_s": 0.01, "draft_pass_s": 0.002, "cost_ratio": 0.2}
    return {
        "population": "prompts of prompts.txt",
        "units": list(range(units)),
        "setting": {"parameter_ratio": 0.2} | setting,
        "sums": sums,
        "totals": totals,
        "source": {"command": "measure", "sizes": {"target": 1000, "draft": 200}},
    }


def _blocks(gamma: int) -> dict[str, Any]:
    """Of 32 texts of 20 tokens, tau = 1.4 + gamma / 5."""
    calls = [20 / (1.4 + gamma / 5)] * 32
    row = _measured(32, {"gamma": gamma}, tokens=[20.0] * 32, emitted=[20.0] * 32, calls=calls)
    row["sums"]["acceptance"] = [12.0] * 32
    costs = {"block_cost": 1.0 + 0.25 * gamma, "break_even_acceptance": 0.3}
    row["totals"] |= costs | {"block_cost_ratio": 1.1, "block_s": 0.01 + 0.0025 * gamma}
    return row


def timed_requests() -> dict[str, Any]:
    """16 requests at gamma 2, about 1.3 times as fast as without the draft."""
    seconds = [1 + place / 40 for place in range(16)]
    sums = {
        "seconds": seconds,
        "target_seconds": [1.3 * one + 0.1 * (place % 3) for place, one in enumerate(seconds)],
        **{name: [0.1] * 16 for name in ("first_seconds", "target_first_seconds")},
        **{name: [20.0] * 16 for name in ("tokens", "target_tokens")},
        **{name: [1.0] * 16 for name in ("first_tokens", "target_first_tokens")},
        "emitted": [19.0] * 16,
        "calls": [10.0] * 16,
        "examined": [18.0] * 16,
        "rejected": [8.0] * 16,
    }
    return _measured(16, {"gamma": 2, "timed": "requests"}, **sums)


def measurement(folder: Path) -> Path:
    """The output of `measure --json`."""
    acceptance = {"acceptance": [12.0] * 32, "greedy_acceptance": [11.0] * 32}
    texts = _measured(32, {}, tokens=[20.0] * 32, agreement=[12.0] * 32, **acceptance)
    tried = _blocks(2)
    tried["setting"]["timed"] = "choosing"
    tried["totals"] |= {"block_s": 0.2, "num_requests": 4}
    config = {"target": "models/target", "draft": "models/draft"}
    found = {
        "schema_version": 2,
        "kind": "measure",
        "config": config | {"prompts": {"path": "prompts.txt"}},
        "verdict": {
            "go": True,
            "gamma": 2,
            "reason": "measured 1.30x (1.20 to 1.40) at gamma 2; <b>& more",
        },
        "environment": ENVIRONMENT,
        "rows": [texts, *map(_blocks, (1, 2, 4)), tried, timed_requests()],
    }
    return write_json(folder / "measured.json", found)


def served(folder: Path) -> Path:
    """The output of `measure --engine --json`."""
    calls = [20.0 + place for place in range(10)]
    parts = {"emitted": 1.9, "calls": 1.0, "drafted": 2.0, "accepted": 0.9}
    whole = {name: [part * count for count in calls] for name, part in parts.items()}
    sums = {"": whole} | {
        place: {"position_accepted": [part * count for count in calls], "calls": calls}
        for place, part in enumerate((0.5, 0.4))
    }
    rows = [
        {
            "population": "prompts of p.txt",
            "units": list(range(10)),
            "setting": {"counts": name} | ({} if place == "" else {"position": place}),
            "sums": values,
            "source": {"command": "measure --engine"},
        }
        for name in ("served", "predicted")
        for place, values in sums.items()
    ]
    config = {"target": "models/target", "draft": "models/draft", "prompts": {"path": "p.txt"}}
    found = {
        "kind": "measure --engine",
        "config": config | {"engine": {"engine": "vllm"}},
        "engine": "vLLM",
        "engine_version": "0.32.0",
        "num_requests": 64,
        "num_tokens": 900,
        "rows": rows,
        "agreement": {
            "agrees": True,
            "reason": "figures agree at 2 positions",
            "ratio": interval(1.0),
        },
        "speed": {
            "speedup": interval(1.2),
            "speedup_by_start": [1.2],
            "plain_tokens_per_s": 50.0,
            "speculative_tokens_per_s": 60.0,
            "num_equal": 60,
        },
        "environment": ENVIRONMENT,
    }
    return write_json(folder / "served.json", found)


def losslessness(folder: Path, *, p_value: float = 0.4) -> Path:
    """The output of `verify --json`."""

    def checked(counts: list[int], g: float, p: float) -> dict[str, Any]:
        totals = {"g_statistic": g, "p_value": p, "impossible": 0, "border": 0}
        row = {"population": "cells", "units": list(range(4)), "setting": {}}
        row |= {"sums": {"tokens": counts}, "totals": totals, "source": {"command": "verify"}}
        return {"row": row, "false_alarm": 1e-4}

    sums = {"tokens": [12] * 5, "identical": [1] * 5, "ties": [0] * 5}
    texts = {"population": "prompts of p.txt", "units": list(range(5)), "setting": {}}
    greedy = {"row": texts | {"sums": sums, "source": {"command": "verify"}}}
    config = {"target": "models/target", "draft": "models/draft", "prompts": {"path": "p.txt"}}
    found = {
        "kind": "verify",
        "config": config,
        "greedy": greedy | {"first_difference": None},
        "distribution": checked([22, 19, 18, 21], 0.5, p_value),
        "broken_distribution": checked([60, 10, 5, 5], 80.0, 1e-9),
        "passed": p_value >= 1e-4,
    }
    return write_json(folder / "verified.json", found)


def training_run(folder: Path, kind: str = "Align", num_steps: int = 600) -> Path:
    """A finished run with an evaluation before, in the middle and after."""
    manifest(folder, kind, target="models/target", draft="models/draft", output="runs/aligned")

    def evaluation(value: float) -> dict[str, float]:
        bounds = {"expected_acceptance_low": value - 0.1, "expected_acceptance_high": value + 0.1}
        return {"expected_acceptance": value, "block_efficiency": 1 + value} | bounds

    rows: list[dict[str, Any]] = [{"step": 0, "evaluation": evaluation(0.3)}]
    for step in range(1, num_steps + 1):
        figures = {"loss": 2.0 - step / num_steps, "gradient_norm": 1.0, "tokens_per_s": 500.0}
        rows.append({"step": step, "num_tokens": 10, "elapsed_s": step / 10, **figures})
    rows.append({"step": num_steps // 2, "evaluation": evaluation(0.4)})
    lines = [json.dumps(one) + "\n" for one in rows]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    result = {"draft": "d", "num_steps": num_steps, "elapsed_s": 60.0, "after": evaluation(0.5)}
    write_json(folder / "result.json", result)
    return folder


def trajectory_run(folder: Path) -> Path:
    """Two runs of three drafts, on one task."""
    rows = [
        trajectory_row(run, label, 50 * place, gamma, tau=1.5 + place / 5)
        for run in ("runs/first", "runs/second")
        for place, label in enumerate(("start", "step 50", "end"))
        for gamma in (3, 5)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_result_rows(folder / "rows.jsonl", rows)
    manifest(folder, "Trajectory", target="models/target", runs=["runs/first", "runs/second"])
    return folder


def trajectory_row(
    run: str, label: str, step: int, gamma: int, *, tau: float = 1.8, **setting: Any
) -> Row:
    """A draft on eight texts of 90 tokens."""
    named = {} if label == "start" else {"draft": Path(run).name, "step": step}
    setting = {"task": "translation", **named, "label": label, "parameter_ratio": 0.2} | setting
    marks = {"draft": f"{run} {label}", "start": f"{run} start"}
    return Row(
        population=f"prompts of {setting['task']}",
        units=tuple(range(8)),
        setting={"temperature": 0.0} | setting | {"gamma": gamma},
        sums={
            "tokens": (90,) * 8,
            "acceptance": (45.0,) * 8,
            "greedy_acceptance": (45.0,) * 8,
            "agreement": (50,) * 8,
            "cross_entropy": (180.0,) * 8,
            "emitted": tuple(tau * (50 + place) for place in range(8)),
            "calls": tuple(50.0 + place for place in range(8)),
        },
        totals={"elapsed_s": step / 10},
        source=Source(command="paceline trajectory", run=run, fingerprints=marks),
    )


def tune_run(folder: Path) -> Path:
    """One candidate that meets the floor and one that does not."""

    def tried(alpha: float, quality: float, examples: str, met: str) -> dict[str, Any]:
        strategy = Speculative(rule=Chow(alpha), num_speculative_tokens=3)
        cell = row(Chow(alpha), [example(quality, 1 / (1.2 + alpha))] * 10, gamma=3)
        limits = {"lower_limit": quality - 0.02} if examples == "confirming" else {}
        sums = {"target_score": [1.0] * 10}
        found = cell.extended(sums, limits, examples=examples, met=met)
        decoding = DecodingConfig(strategy=strategy, sampling=SamplingParams(temperature=0))
        return {
            "decoding": decoding.model_dump(mode="json"),
            "row": found.model_dump(mode="json"),
        }

    chosen = tried(0.2, 1.0, "confirming", "yes")
    config = {
        "target": "models/target",
        "draft": "models/draft",
        "task": {"task": "arithmetic"},
        "output": "runs/tune",
        "quality_floor": 0.95,
    }
    result = {
        "chosen": chosen,
        "tried": [tried(0.2, 0.99, "choosing", "yes"), tried(0.6, 0.8, "choosing", "no"), chosen],
        "failed": [],
        "num_tests": 1,
        "statement": "The test misses the bound in 1 of 5 runs at most.",
        "config": config,
    }
    manifest(folder, "Tune", **config)
    write_json(folder / "result.json", result)
    return folder


RUNS: dict[str, Callable[[Path], Path]] = {
    "bench": bench_run,
    "measure": measurement,
    "served": served,
    "verify": losslessness,
    "align": training_run,
    "trajectory": trajectory_run,
    "tune": tune_run,
}
