"""`paceline measure` on several drafts: the same texts, one table, differences paired by prompt."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import validate
from paceline.decode.ngram import NgramDraft, continuation
from paceline.errors import UsageError
from paceline.measure import DraftComparison, MeasureConfig, measure_draft, measure_drafts
from paceline.measure.measurement import measure_models
from paceline.models import load_model
from paceline.results import load
from paceline.results.row import Row, read_rows
from support.engines import Answer, llamacpp_routes, serving
from support.models import save_tiny, tiny_tokenizer
from support.runs import write_pair
from support.texts import Run, refused, sets, succeeded

FEW = {
    "num_prompts": 7,
    "max_prompt_tokens": 6,
    "max_new_tokens": 10,
    "gammas": [1, 3],
    "pass_repeats": 1,
    "timed_prompts": 0,
    "dtype": "float32",
}
OPTIONS = [word for key, value in FEW.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def folder(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair, and beside it: another draft, a copy of the draft, and two that do not fit."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in ("target", "draft"):
        shutil.copytree(pair_folder / name, folder / name)
    shutil.copy(pair_folder / "corpus.jsonl", folder)
    shutil.copytree(folder / "draft", folder / "copy")
    save_tiny(folder / "other", seed=5, num_hidden_layers=1)
    save_tiny(folder / "seq2seq", "t5")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["newer"])
    save_tiny(folder / "larger", "llama", tokenizer)
    return folder


def config(folder: Path, draft: Any, **changes: Any) -> MeasureConfig:
    values = {"target": str(folder / "target"), "prompts": str(folder / "corpus.jsonl"), **FEW}
    first, *others = [draft] if isinstance(draft, str) else draft
    return validate(MeasureConfig, values | {"draft": first, "other_drafts": others} | changes)


def arguments(folder: Path, *drafts: str) -> list[Any]:
    named = [word for draft in drafts for word in ("--draft", folder / draft)]
    prompts = folder / "corpus.jsonl"
    return ["measure", "--target", folder / "target", *named, "--prompts", prompts, *OPTIONS]


@pytest.fixture(scope="module")
def compared(folder: Path) -> DraftComparison:
    drafts = [str(folder / name) for name in ("draft", "other", "copy")]
    return measure_drafts(config(folder, drafts))


def without_time(row: Row) -> Row:
    return row.model_copy(update={"totals": {}})


def test_lookups_in_the_text_are_a_draft_without_a_model(run: Run, folder: Path):
    """Its acceptance is p of the token that followed before; else q is uniform."""
    chosen = config(folder, "ngram")
    target = load_model(folder / "target", dtype="float32")
    prompts = [[5, 6, 7, 5, 6], [9, 9], [11, 12]]
    texts = [[7, 5, 6, 7, 5], [9, 9, 30, 9], [13, 11, 12, 14]]
    draft: Any = NgramDraft(target)
    found = measure_models(target, draft, prompts, chosen, completions=texts)
    wanted = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            logits_TV = target.hf(torch.tensor([[*prompt, *text]])).logits[0]
        probs_TV = logits_TV[:, : target.vocab_size].softmax(-1)
        for place in range(len(text)):
            read = [*prompt, *text[:place]]
            p_V, token = probs_TV[len(read) - 1], continuation(read)
            flat = p_V.clamp(max=1 / len(p_V)).sum()
            wanted.append(float(flat if token is None else p_V[token]))
    assert found.figure("expected_acceptance").value == pytest.approx(np.mean(wanted), rel=1e-4)

    code, out, _ = run(*arguments(folder, "draft"), "--draft", "ngram", "--json")
    assert code in (0, 1, 3)
    own = [one["config"]["draft"] for one in json.loads(out)["measurements"]]
    assert own == [str(folder / "draft"), "ngram"]
    assert "ngram" in json.loads(out)["conclusion"]


def test_slices_have_lines_and_a_table(run: Run, folder: Path, tmp_path: Path):
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    prompts = tmp_path / "prompts.jsonl"
    tasks = ["code", "chat"] * len(rows)
    named = [row | {"task": task} for row, task in zip(rows, tasks, strict=False)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in named))
    given = ["--target", folder / "target", "--draft", folder / "draft", "--prompts", prompts]
    code, out, _ = run("measure", *given, *OPTIONS, "--slices", "task", "--slices", "prompt_tokens")
    assert code in (0, 1, 3)
    shown = " ".join(out.split())
    assert "task code: TOO FEW, expected" in shown
    assert "task chat: TOO FEW, expected" in shown
    assert "prompt_tokens 1 to 16: TOO FEW, expected" in shown
    page = tmp_path / "page.html"
    run("measure", *given, *OPTIONS, "--set", 'slices=["task"]', "--html", page)
    assert "Slices of the prompts" in page.read_text()
    line = refused(run, "measure", *given, *OPTIONS, "--slices", "topic", "--dry-run")
    assert "topic" in line


def test_each_draft_has_the_figures_that_it_has_alone(folder: Path, compared: DraftComparison):
    """The target writes its texts once; alone, it writes them for each draft."""
    for found in compared.measurements:
        alone = measure_draft(config(folder, found.config.draft))
        assert list(map(without_time, found.rows)) == list(map(without_time, alone.rows))
        assert found.config == alone.config


def test_a_difference_is_that_of_the_ratios_of_sums_with_the_interval_of_a_paired_bootstrap(
    compared: DraftComparison,
):
    """By numpy, 20,000 resamples; of few prompts, the interval contains that of percentiles."""
    names = {
        "expected_acceptance": ("acceptance", "tokens"),
        "block_efficiency": ("emitted", "calls"),
    }
    for figure, (over, under) in names.items():
        lines = [line for line in compared.compared() if line.figure == figure]
        assert [line.difference is None for line in lines] == [True, False, False]
        rows = [
            next(r for r in found.rows if r.setting.get("gamma") == line.gamma)
            for found, line in zip(compared.measurements, lines, strict=True)
        ]
        first, second = (np.array([row.sums[over], row.sums[under]]) for row in rows[:2])
        picks = np.random.default_rng(0).integers(0, first.shape[1], (20_000, first.shape[1]))
        ratios = [side[0][picks].sum(1) / side[1][picks].sum(1) for side in (second, first)]
        low, high = np.quantile(ratios[0] - ratios[1], [0.025, 0.975])
        value = second[0].sum() / second[1].sum() - first[0].sum() / first[1].sum()
        found = lines[1].difference
        assert found is not None
        assert found.value == pytest.approx(value)
        assert found.low <= low + 0.1 * (high - low)
        assert found.high >= high - 0.1 * (high - low)


def test_a_copy_of_the_first_draft_differs_by_nothing(compared: DraftComparison):
    names = {"expected_acceptance", "block_efficiency"}  # speedups are at the gamma of the fastest
    copies = [line for line in compared.compared() if line.draft.endswith("copy")]
    found = {line.figure: line.difference for line in copies if line.figure in names}
    assert found == dict.fromkeys(names, (0, 0, 0))
    # one shape, one cost: else the noise of timing would tell them apart
    costs = [[row.totals for row in one.blocks] for one in compared.measurements]
    assert costs[0] == costs[2] != costs[1]
    lines = [line for line in compared.compared() if line.figure == "expected_speedup"]
    assert lines[2].difference == (0, 0, 0)
    best = max(lines, key=lambda line: line.value.value)
    shown = f"fastest: {best.draft}" if best.draft.endswith("other") else "no draft is shown"
    assert compared.conclusion.startswith(shown)


def test_one_file_has_the_rows_of_all_drafts(run: Run, folder: Path, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    code, out, _ = run(*arguments(folder, "draft", "other"), "--rows", rows, "--json")
    found = json.loads(out)
    assert code == 3  # 7 prompts are too few for a verdict
    drafts = [str(folder / name) for name in ("draft", "other")]
    assert [one["config"]["draft"] for one in found["measurements"]] == drafts
    written = read_rows(rows)
    assert [row.setting["draft"] for row in written] == [d for d in drafts for _ in range(3)]
    assert {row.units for row in written} == {tuple(range(7))}
    frame = load(rows)
    lines = [line for line in found["compared"] if line["figure"] == "block_efficiency"]
    assert [line["draft"] for line in lines] == drafts
    for line in lines:
        own = frame[(frame["draft"] == line["draft"]) & (frame["gamma"] == line["gamma"])]
        assert list(own["block_efficiency"]) == pytest.approx([line["value"]["value"]])
    read = DraftComparison.model_validate_json(out)
    assert json.loads(read.model_dump_json()) == found


def test_a_file_names_several_drafts(run: Run, folder: Path, tmp_path: Path):
    file = tmp_path / "drafts.yaml"
    file.write_text(
        f"target: {folder}/target\ndraft: {folder}/draft\nother_drafts: [{folder}/other]\n"
        f"prompts: {folder}/corpus.jsonl\n"
    )
    code, out, _ = run("measure", "--config", file, *OPTIONS, "--json")
    assert (code, json.loads(out)["kind"]) == (3, "measure drafts")
    code, out, _ = run("validate", "measure", file)
    assert (code, f"- {folder}/other" in out) == (0, True)


def test_drafts_that_cannot_be_compared_are_refused_in_one_line(run: Run, folder: Path):
    for second, words in {
        "larger": f"draft {folder}/larger: the tokenizers of target and draft differ",
        "seq2seq": f"draft {folder}/seq2seq: the target is decoder-only and the draft is an enc",
        "missing": "missing",
    }.items():
        assert words in refused(run, *arguments(folder, "draft", second))
    engine = ("--engine", "transformers")
    engine_of_two = refused(run, *arguments(folder, "draft", "other"), *engine)
    assert "--engine serves one draft; give one --draft" in engine_of_two
    with pytest.raises(UsageError, match="use measure_drafts"):
        measure_draft(config(folder, ["a", "b"]))


SERVER = Path(__file__).parents[1] / "support/fake_llama_server.py"
SMALL = [
    *("--set", "num_prompts=8", "--set", "max_new_tokens=24"),
    *("--set", "num_speculative_tokens=2", "--set", "dtype=float32", "--temperature", "0"),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.process._POLL_S", 0.02)


def given(folder: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "target")]
    prompts = ["--prompts", str(Path(__file__).with_name("prompts.txt"))]
    return ["measure", *pair, *prompts, *SMALL, *more]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options that start the small server in the place of llama-server."""
    with ExitStack() as servers:

        def load(body: dict[str, Any]) -> Answer:
            names = (body["target"], body["draft"])
            models = [name and load_model(name, dtype="float32", device="cpu") for name in names]
            routes = llamacpp_routes(*models, body["gamma"])
            return 200, {"url": servers.enter_context(serving(routes))}

        models = servers.enter_context(serving({"/load": load}))
        program = tmp_path_factory.mktemp("bin") / "llama-server"
        # -S: without packages, which it does not need
        command = f'"{sys.executable}" -S "{SERVER}" "{models}"'
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        named = ["--set", f"engine.program={program}", "--allow-program", str(program)]
        yield ["--engine", "llamacpp", *named]


def test_an_engine_is_started_without_and_with_the_draft_and_its_costs_give_a_verdict(
    run, started, tmp_path
):
    pair_folder = write_pair(tmp_path / "pair", rounded_to=torch.float32)  # longer than noise
    costs = tmp_path / "costs.json"
    # 12 rounds, as a busy machine spoils some
    timed = ["--set", "write_costs.gammas=[2]", "--set", "write_costs.num_rounds=12"]
    code, out, err = run(
        *given(pair_folder, *started, *timed, "--write-costs", str(costs), "--json")
    )
    found = json.loads(out)
    speedup = found["speed"]["speedup"]
    assert code == (0 if speedup["low"] > 1 else 1 if speedup["high"] < 1 else 3), err
    assert f"measured {speedup['value']:.2f}x" in found["verdict"]["reason"]
    # the draft is the target itself: every block keeps both tokens, but for the last one of a text
    served = [row["sums"] for row in found["rows"] if row["setting"].get("counts") == "served"]
    assert served[1]["position_accepted"] == served[1]["calls"]
    assert found["speed"]["num_equal"] == found["num_requests"] == 8
    assert found["engine"] == "llamacpp"
    assert found["agreement"]["agrees"]
    written = json.loads(costs.read_text())
    assert written == found["costs"]
    steps = [(one["gamma"], one["batch_size"]) for one in written["steps"]]
    assert steps == [(0, 1), (2, 1)]
    assert all(one["seconds"]["value"] > 0 for one in written["steps"])
    pair = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "target")]
    prompts = ["--prompts", str(Path(__file__).with_name("prompts.txt"))]
    few = ["--set", "num_prompts=8", "--set", "max_new_tokens=12"]
    code, out, err = run("measure", *pair, *prompts, *few, "--costs", str(costs), "--table")
    assert code in (0, 1, 3), err
    word = {0: "GO", 1: "NO-GO", 3: "UNDECIDED"}[code]
    head = rf"^{word}  expected .*x .* in llamacpp .* at gamma \d: 8 texts, temperature 1, raw"
    assert re.search(head, out, re.MULTILINE)
    assert "one step in llamacpp" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('"--die-after", "3"', "closed the connection ... ggml_abort: no memory left"),
        ('"--crash"', "ended while it was starting (killed by SIGSEGV)"),
        ('"--no-such-option"', "ended while it was starting ... --no-such-option"),
    ],
)
def test_a_server_that_ends_is_one_line_with_its_last_words(
    run, pair_folder, started, options, said
):
    code, out, err = run(*given(pair_folder, *started, "--set", f"engine.options=[{options}]"))
    assert (code, out) == (3, "")
    line = err.strip().splitlines()[-1]
    assert all(part in line for part in said.split(" ... ")), line


def test_a_draft_with_a_mask_is_measured_and_verified_both_ways(run: Run, tmp_path: Path):
    """The same weights: other tokens per call, and costs of its own beside an ordinary draft."""
    folder = write_pair(tmp_path / "pair")
    shutil.copytree(folder / "draft", folder / "masked")
    config = json.loads((folder / "draft/config.json").read_text()) | {"pard_token": 9}
    (folder / "masked/config.json").write_text(json.dumps(config))
    given = ("--target", folder / "target", "--prompts", folder / "corpus.jsonl")
    few = sets(num_prompts=4, max_prompt_tokens=6, max_new_tokens=8)
    costs = sets(gammas="[3]", pass_repeats=6, timed_prompts=0)
    several = ("--draft", folder / "masked", "--draft", folder / "draft", "--json")
    calls: list[list[float]] = []
    for parallel in ("true", "false", "true"):
        _, out, _ = run("measure", *given, *several, *few, *costs, *sets(parallel=parallel))
        found = json.loads(out)["measurements"]
        calls.append([sum(one["rows"][1]["sums"]["calls"]) for one in found])
        drafting = {one["rows"][1]["totals"]["block_s"] for one in found}
        assert len(drafting) == (1 if parallel == "false" else 2)
        whole, of_gamma = (row["setting"]["parameter_ratio"] for row in found[0]["rows"][:2])
        assert of_gamma == (whole if parallel == "false" else whole / 3), "one pass, for MBSU"
        more = sets(max_prompt_tokens=6, max_new_tokens=24, parallel=parallel)
        succeeded(run, "verify", *given, *several[:2], *more)
    assert calls[0] == calls[2]
    assert calls[0][0] != calls[0][1] == calls[1][0] == calls[1][1]
