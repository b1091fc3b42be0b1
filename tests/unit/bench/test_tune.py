"""Tuning: what is proposed, what is chosen, and that it holds on examples nobody has seen."""

import json
import math
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.bench import BenchConfig, bench, read_rows, runner
from paceline.bench.answers import read_texts
from paceline.bench.tune import Candidate, TuneConfig, Tuned, spread, tune, undominated
from paceline.cli.decode import usage
from paceline.cli.result_tables import tuned_lines
from paceline.cli.tables import printed
from paceline.config import load_config, validate
from paceline.core.rules import Chow, Lenient, Lossless, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.data.input_checks import InputChecks
from paceline.decode import AutoregressiveDecoder
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.errors import (
    NOT_DONE,
    ConfigError,
    ModelLoadError,
    NotReachedError,
    PacelineError,
    UsageError,
)
from paceline.models import load_model
from paceline.records import RunDirectory
from paceline.tasks.base import examples_of
from paceline.train.config import Checkpoints
from paceline.view.tables import tuned_tables
from support.data import write_lines
from support.engines import step, write_costs

QUESTIONS = [
    f"the {a} sat near the {b}" for a in ("cat", "hen", "man", "ant") for b in ("inn", "tin", "pan")
]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """The right answers are the target's own greedy ones."""
    target = load_model(folder / "target", "float32")
    assert target.tokenizer is not None
    prompts = [target.tokenizer(text)["input_ids"] for text in QUESTIONS]
    answers = AutoregressiveDecoder(target, SamplingParams(temperature=0)).generate(prompts, 8)
    pairs = [
        {"prompt": text, "completion": "good " + target.tokenizer.decode(answer.tokens)}
        for text, answer in zip(QUESTIONS, answers, strict=True)
    ]
    write_lines(folder / "questions.jsonl", *pairs)
    return folder


def settings(folder: Path, output: Path, **changes: Any) -> TuneConfig:
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "task": {"task": "pairs", "corpus": str(folder / "questions.jsonl"), "metric": "rouge1"},
        "output": output,
        "rules": [{"rule": "chow", "alpha": [0.5, 1.0]}, {"rule": "token_v3", "alpha": 0.5}],
        "num_speculative_tokens": [1, 3],
        "num_candidates": 3,
        "num_examples": 4,
        "num_confirmed": 8,
        "num_timed": 3,
        "max_new_tokens": 8,
        "sampling": {"temperature": 0.0},
        "dtype": "float32",
        "device": "cpu",
    }
    return validate(TuneConfig, values | changes)


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A finished run, which tests read or continue in a copy."""
    return tune(settings(folder, tmp_path_factory.mktemp("tuned") / "run", quality_floor=0.4))


def candidate(alpha: float, surprisal: float, speedup: float) -> Candidate:
    decoding = DecodingConfig(strategy=Speculative(rule=Chow(alpha)))
    return Candidate(surprisal, speedup, decoding)


def alphas(decodings: list[DecodingConfig]) -> list[float]:
    return [d.strategy.rule.alpha for d in decodings]  # pyright: ignore


def test_only_candidates_that_no_other_beats_at_both_are_kept_from_the_least_surprising_on():
    given = [
        candidate(0.1, 0.0, 1.0),
        candidate(0.2, 0.3, 1.5),
        candidate(0.3, 0.2, 1.4),
        candidate(0.4, 0.25, 1.3),  # more surprising and slower than 0.3
        candidate(0.5, 0.3, 1.2),
    ]
    assert alphas(undominated(given)) == [0.1, 0.3, 0.2]


@pytest.mark.parametrize(("count", "kept"), [(9, [0, 1, 2, 3, 4]), (3, [0, 2, 4]), (1, [0])])
def test_of_many_candidates_some_at_even_steps_are_measured(count: int, kept: list[int]):
    given = [candidate(number / 10, 0.1, 1.0).decoding for number in range(5)]
    assert alphas(spread(given, count)) == [number / 10 for number in kept]


def test_the_setting_holds_on_unseen_examples_and_decode_reads_it(folder: Path, tmp_path: Path):
    found = tune(settings(folder, tmp_path / "run", quality_floor=0.98))
    assert found.chosen.row.has(examples="confirming")
    assert found.chosen.measure("relative_quality").value >= 0.98
    written = load_config(DecodingConfig, tmp_path / "run" / "decoding.yaml")
    assert written == found.chosen.decoding
    chosen_from = [one.decoding.strategy for one in found.tried if one.row.has(examples="choosing")]
    lossless = [s for s in chosen_from if isinstance(s, Speculative) and s.rule == Lossless()]
    assert len(lossless) == 1, "measured whatever the others promise, and once"


def test_what_is_printed_of_settings_follows_from_the_rows_in_the_json(tuned: Tuned):
    """By numpy. The target alone has a speedup of 1, and it and lossless rules a quality of 1."""
    rows = [one["row"] for one in json.loads(tuned.model_dump_json())["tried"]]
    assert {row["setting"]["examples"] for row in rows} == {"choosing", "confirming"}
    seen = StringIO()
    Console(file=seen, width=80).print(printed(*tuned_tables(tuned)))
    text = seen.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    choosing, confirming = text.split("On other examples")
    tables = {"choosing": choosing.splitlines(), "confirming": confirming.splitlines()}
    for row in rows:
        sums = {name: np.array(values, dtype=float) for name, values in row["sums"].items()}
        timed = ~np.isnan(sums["target_seconds"])
        per_token = sums["target_seconds"][timed].sum() / sums["target_tokens"][timed].sum()
        speedup = per_token * sums["tokens"][timed].sum() / sums["seconds"][timed].sum()
        quality = sums["score"].sum() / sums["target_score"].sum()
        setting = row["setting"]
        alone = setting["family"] == "autoregressive"
        quality = 1.0 if alone or "lossless" in setting else quality
        speedup = 1.0 if alone else speedup
        lines = map(str.split, tables[setting["examples"]])
        own = [line for line in lines if line[:1] == setting["family"].split()[:1]]
        cells = {f"{quality:.2f}", f"{speedup:.2f}", *setting["met"].split()}
        assert any(cells <= set(line) for line in own), (setting, own)
        limit = row["totals"].get("lower_limit")
        assert limit is None or any(f"{limit:.3f}" in line for line in own)


def test_too_few_examples_of_the_task_are_known_before_a_model_is_loaded_and_in_a_dry_run(
    folder: Path, tmp_path: Path
):
    few = settings(folder, tmp_path, quality_floor=0.9, num_confirmed=9)
    nowhere = few.model_copy(update={"target": "nowhere"})
    bench = few.model_dump(include={"target", "draft", "task"})
    skipping = BenchConfig(**bench, output=tmp_path / "bench", num_examples=6, skip_examples=7)
    for work in (
        lambda: tune(nowhere),
        lambda: few.check(InputChecks()),
        lambda: skipping.check(InputChecks()),
    ):
        with pytest.raises(UsageError, match="has 12 distinct examples, 13 were requested"):
            work()


def test_a_candidate_that_fails_is_named_and_the_others_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    build = runner.build_decoder

    def broken(decoding: DecodingConfig, *models: Any) -> Any:
        if decoding == proposed[1]:
            raise RuntimeError("no\nroom")
        return build(decoding, *models)

    proposed = [
        DecodingConfig(strategy=Speculative(rule=rule), sampling=SamplingParams(temperature=0))
        for rule in (Lossless(), Chow(1.0))
    ]
    monkeypatch.setattr("paceline.bench.tune.propose", lambda *_: proposed)
    monkeypatch.setattr(runner, "build_decoder", broken)
    found = tune(settings(folder, tmp_path / "run", quality_floor=0.9))
    assert found.chosen.decoding != proposed[1]
    assert [(cell.decoding, cell.error) for cell in found.failed] == [(proposed[1], "no room")]


def test_a_target_that_cannot_answer_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decoder = "paceline.decode.autoregressive.AutoregressiveDecoder"
    monkeypatch.setattr(f"{decoder}.remaining_context", lambda *_: 3)
    with pytest.raises(UsageError, match="target alone could not answer the examples: example 0"):
        tune(settings(folder, tmp_path / "run", quality_floor=0.9))


def test_a_bound_that_nothing_meets_is_one_line_and_leaves_no_setting_of_an_earlier_one(
    folder: Path, tmp_path: Path, tuned: Tuned
):
    out = shutil.copytree(tuned.config.output, tmp_path / "run")
    assert (out / "decoding.yaml").exists()
    with pytest.raises(NotReachedError, match="the best relative_quality is"):
        tune(settings(folder, out, quality_floor=50.0))
    assert not (out / "decoding.yaml").exists()
    assert not (out / "result.json").exists()


def test_choosing_and_confirming_share_no_example(tuned: Tuned):
    run = tuned.config.output
    seen = tuned.config.task.examples("test", 12, 0)
    assert len({example.record.text for example in seen}) == 12
    sizes = {
        name: {len(row.units) for row in read_rows(run / name)}
        for name in ("choosing", "confirming")
    }
    assert sizes == {"choosing": {4}, "confirming": {8}}
    first, other = (
        {unit for row in read_rows(run / name) for unit in row.units}
        for name in ("choosing", "confirming")
    )
    assert first.isdisjoint(other)
    texts = [read_texts(run / name) for name in ("choosing", "confirming")]
    begun = [{tuple(tokens[0]) for tokens in each.values()} for each in texts]
    assert begun[0].isdisjoint(begun[1])


@pytest.mark.slow
def test_a_second_start_measures_nothing_and_says_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = settings(folder, tmp_path / "run", quality_floor=0.01)
    first = tune(config)

    def never(*_: Any) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr("paceline.bench.runner.run_together", never)
    # proposals rest on pass times, which differ from start to start: the same ones, for this
    proposed = [one.decoding for one in first.tried if one.row.has(examples="choosing")][1:]
    monkeypatch.setattr("paceline.bench.tune.propose", lambda *_: proposed)
    assert tune(config).chosen == first.chosen


def test_the_quality_of_the_draft_alone_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    config = settings(folder, tmp_path / "run", quality_floor=0.9, rules=[{"rule": "lossless"}])
    tune(config)
    rouge, scores = RougeScorer(["rouge1"]), list[list[float]]()
    examples = examples_of(config.task, "test", config.num_examples, config.seed)
    for name in ("draft", "target"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        scores.append([])
        for example in examples:
            given = tokenizer(example.record.text, return_tensors="pt").input_ids
            text = model.generate(given, max_new_tokens=8, do_sample=False)[0, given.shape[1] :]
            answer = tokenizer.decode(text, skip_special_tokens=True)
            scores[-1].append(rouge.score(example.reference, answer)["rouge1"].fmeasure)
    wanted = f"the draft alone has {sum(scores[0]) / sum(scores[1]):.2f} of the target's quality"
    assert wanted in caplog.text
    tune(settings(folder, tmp_path / "same", quality_floor=0.9, draft=str(folder / "target")))
    assert "has 1.00 of the target's quality on these examples: the metric hardly" in caplog.text


def test_what_is_printed_of_a_choice(tuned: Tuned):
    """Only what is known without a measurement is 1 by proof, whatever the width of an interval."""
    (lossy,) = [one for one in tuned.tried if "chow" in one.row.setting["family"]][:1]
    sums = dict.fromkeys(lossy.row.sums, (1.0,) * len(lossy.row.units))
    sums |= {"target_seconds": (1.5,) * len(lossy.row.units)}
    row = lossy.row.model_copy(update={"sums": sums})
    exact = lossy.model_copy(update={"row": row})
    line, lossless = map(str, tuned_lines(tuned.model_copy(update={"chosen": exact})))
    assert "speedup 1.500 (95%: 1.500 to 1.500), relative quality 1.000 (95%: " in line
    assert "rouge1 1.000, the target's 1.000" in line
    assert lossless.startswith("lossless gamma ")
    (measured, *_) = [one for one in tuned.tried if one.row.setting["family"] == "lossless"]
    sums = sums | {"target_seconds": (1.25,) * len(row.units)}
    slower = exact.model_copy(update={"row": row.model_copy(update={"sums": sums})})
    changes = {"chosen": measured, "tried": (measured, slower, exact)}
    _, other = map(str, tuned_lines(tuned.model_copy(update=changes)))
    assert other.startswith(
        f"the fastest of 2 lossy settings on the first {len(row.units)} examples: chow alpha 1, "
        "gamma 1  speedup 1.500 (1.500 to 1.500), relative quality 1.000 ("
    )
    alone = next(one for one in tuned.tried if one.row.setting["family"] == "autoregressive")
    line, _ = map(str, tuned_lines(tuned.model_copy(update={"chosen": alone})))
    assert "  no draft, as no setting that meets the bound is faster, relative quality 1 by" in line
    assert "paceline align" in usage(tuned.model_copy(update={"chosen": alone}))


def test_what_is_there_outlives_a_mistake(folder: Path, tmp_path: Path, tuned: Tuned):
    run = RunDirectory(tmp_path / "out")
    run.write_manifest(Checkpoints())  # of another kind of run
    run.write_result({"kept": True})
    with pytest.raises(ConfigError, match="holds a run of another kind, Checkpoints"):
        tune(settings(folder, run.path, quality_floor=0.9))
    with pytest.raises(ConfigError, match="holds a run of another kind, Checkpoints"):
        bench(
            validate(
                BenchConfig, {"target": "x", "draft": "x", "task": "arithmetic", "output": run.path}
            )
        )
    assert run.read_result() == {"kept": True}
    known = RunDirectory(shutil.copytree(tuned.config.output, tmp_path / "tuned"))
    with pytest.raises(ModelLoadError):
        tune(settings(folder, known.path, target=str(tmp_path / "nothing"), quality_floor=0.4))
    assert (known.path / "decoding.yaml").exists()
    assert known.read_result() is not None


def test_a_part_of_nothing_is_no_bound(folder: Path, tmp_path: Path):
    """Where the target scores 0, one lucky answer is infinitely better."""
    rows = [{"prompt": text, "completion": "xyzzy"} for text in QUESTIONS]
    corpus = write_lines(tmp_path / "wrong.jsonl", *rows)
    task = {"task": "pairs", "corpus": str(corpus), "metric": "rouge1"}
    for _ in "ab":  # the same command goes on
        with pytest.raises(PacelineError, match="the target itself scores 0") as raised:
            tune(settings(folder, tmp_path / "out", task=task, quality_floor=0.5))
        assert raised.value.exit_code == NOT_DONE
    assert len(list((tmp_path / "out" / "choosing").glob("**/rows.jsonl"))) == 1


def test_a_latency_that_nothing_meets_is_one_line_with_the_fastest(folder: Path, tmp_path: Path):
    with pytest.raises(
        NotReachedError, match="at most 1e-06 times the target's: the best speedup is"
    ):
        tune(settings(folder, tmp_path / "fast", max_latency=1e-6, num_timed=None))


def test_a_floor_needs_a_metric(folder: Path, tmp_path: Path):
    text = {"task": "text", "corpus": str(folder / "questions.jsonl")}
    with pytest.raises(UsageError, match="task text has no metric, so no quality floor"):
        tune(settings(folder, tmp_path / "run", task=text, quality_floor=0.9))


@pytest.mark.slow
def test_a_latency_budget_is_met_without_a_metric(folder: Path, tmp_path: Path):
    text = {"task": "text", "corpus": str(folder / "questions.jsonl")}
    found = tune(settings(folder, tmp_path / "run", task=text, max_latency=1000.0, num_timed=None))
    assert math.isnan(found.chosen.measure("quality").value)
    assert found.chosen.measure("speedup").value > 1e-3


def served(folder: Path, output: Path, **sampling: Any) -> TuneConfig:
    return settings(folder, output, quality_floor=0.01, served_by="vllm", sampling=sampling)


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[Speculative]:
    """What was predicted; timing decides which of these are measured."""
    found: list[Speculative] = []

    def spy(given: list[Candidate]) -> list[DecodingConfig]:
        strategies = [one.decoding.strategy for one in given]
        found.extend(one for one in strategies if isinstance(one, Speculative))
        return undominated(given)

    monkeypatch.setattr("paceline.bench.tune.undominated", spy)
    return found


def test_for_vllm_settings_decode_as_the_plugin_serves_them(
    folder: Path, tmp_path: Path, candidates: list[Speculative]
):
    """First and bonus tokens of the target, drafts without filters; lossless needs no other."""
    found = tune(served(folder, tmp_path / "run", temperature=0.7, top_p=0.9))
    assert {one.rule for one in candidates} == {Lossless(), Chow(0.5), Chow(1.0), TokenV3(0.5)}
    for strategy in candidates:
        assert strategy.draft_sampling == SamplingParams(temperature=0.7)
        assert strategy.bonus == ("rule" if strategy.rule.exact else "target")
    assert {one.decoding.strategy for one in found.tried} <= {*candidates, Autoregressive()}
    path = tmp_path / "run" / "decoding.yaml"
    assert load_config(DecodingConfig, path) == found.chosen.decoding
    chosen = found.chosen.model_copy(update={"decoding": DecodingConfig(strategy=candidates[-1])})
    said = usage(found.model_copy(update={"chosen": chosen}))
    gamma = candidates[-1].num_speculative_tokens
    assert said.endswith(f": serve it in vLLM at gamma {gamma} with PACELINE_RULE={path}")


def test_for_vllm_at_temperature_0_there_are_no_cascades(
    folder: Path, tmp_path: Path, candidates: list[Speculative]
):
    """vLLM keeps the target's argmax under them; lenience is served there."""
    rules = (Chow(0.5), Lenient("linear", 0.1), TokenV3(0.5))
    tune(served(folder, tmp_path, temperature=0.0).model_copy(update={"rules": rules}))
    assert {one.rule for one in candidates} == {Lossless(), Lenient("linear", 0.1)}
    assert {one.draft_sampling for one in candidates} == {None}


def test_with_an_engines_costs_its_seconds_and_its_drafts_decide(folder: Path, tmp_path: Path):
    """A block of 1 costs as much as three steps there, one of 3 as much as one: 3 is chosen."""
    costs = write_costs(folder, step(0, 0.01), step(1, 0.03), step(3, 0.01))
    wanted = settings(
        folder, tmp_path / "run", quality_floor=0.5, sampling={"temperature": 0.5}, costs=str(costs)
    )
    found = tune(wanted)
    known = wanted.model_copy(update={"rules": ()}).model_dump(mode="json")
    assert TuneConfig.model_validate(known).rules == (), "an engine has none; a report reads it"
    tried = [(one, one.decoding.strategy) for one in found.tried]
    drafted = [(one, how) for one, how in tried if isinstance(how, Speculative)]
    assert drafted
    for one, strategy in drafted:
        assert strategy.num_speculative_tokens == 3
        assert strategy.draft_sampling == SamplingParams(temperature=0)
        # a block costs a step and gives a token at least; in vLLM no rule takes the first from one
        assert one.measure("speedup").value >= 0.99
        assert strategy.bonus == ("rule" if strategy.rule.exact else "target")
