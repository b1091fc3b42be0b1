"""Rows state figures of all answers together and what scores depend on."""

from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from paceline.bench import BenchConfig, bench, read_rows
from paceline.bench.answers import context_of, key_of, read_texts
from paceline.data.input_checks import InputChecks
from paceline.errors import PromptError, UsageError
from paceline.models import load_model
from paceline.tasks import Translation
from support.data import write_lines
from support.runs import bench_config

pytestmark = pytest.mark.slow

ROWS = [
    {"translation": {"de": f"the {a} sat near the {b}", "en": f" and then the {b} ran"}}
    for a in ("cat", "hen")
    for b in ("inn", "tin", "pan")
]
NESTED = {"prompt_field": "translation.de", "completion_field": "translation.en"}


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_lines(folder / "rows.jsonl", *ROWS)
    return folder


def settings(folder: Path, output: Path, **task: Any) -> BenchConfig:
    corpus = {"path": str(folder / "rows.jsonl"), **NESTED}
    changes = {
        "task": {"task": "translation", "corpus": corpus, "metric": "chrf", **task},
        "grid": {"temperatures": [0.0], "rules": ["lossless"], "num_speculative_tokens": [2]},
    }
    return bench_config(folder, output, **changes, num_examples=4, num_timed=1)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchConfig]:
    config = settings(folder, tmp_path_factory.mktemp("run") / "whole")
    bench(config)
    return config.output, config


def test_a_row_has_the_figures_of_its_answers(folder: Path, finished: tuple[Path, BenchConfig]):
    output, config = finished
    model = load_model(folder / "target", "float32")
    assert model.tokenizer is not None
    references = [example.reference for example in config.task.examples("test", 4)]
    for row in read_rows(output):
        answers = [
            str(model.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
            for tokens in read_texts(output)[key_of(row)]
        ]
        assert {name: row.totals[name] for name in ("bleu", "chrf")} == {
            "bleu": sacrebleu.corpus_bleu(answers, [references]).score,
            "chrf": sacrebleu.corpus_chrf(answers, [references]).score,
        }
        low, high = row.bounds["chrf"]
        assert 0 <= low < row.totals["chrf"] < high
        assert row.source.fingerprints.items() >= config.task.versions().items()
        assert row.setting["metric"] == "chrf"


def test_a_row_of_a_task_without_figures_has_empty_ones(folder: Path, tmp_path: Path):
    pairs = settings(folder, tmp_path / "run", task="pairs", metric="rouge1")
    for row in bench(pairs).rows:
        assert not {"bleu", "chrf"} & {*row.totals, *row.bounds, *row.source.fingerprints}


def test_other_data_and_other_prompts_are_another_context(
    folder: Path, tmp_path: Path, finished: tuple[Path, BenchConfig]
):
    (context,) = {context_of(row) for row in read_rows(finished[0])}
    bench(settings(folder, tmp_path / "run", prompt="de: {source}"))
    assert {context_of(row) for row in read_rows(tmp_path / "run")} != {context}


def test_a_figure_that_cannot_be_computed_fails_the_cell_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> dict[str, float]:
        raise UsageError("no figure")

    monkeypatch.setattr(Translation, "corpus_scores", fail)
    rows = bench(settings(folder, tmp_path / "run")).rows
    assert {(row.error, row.units, len(row.sums)) for row in rows} == {("no figure", (), 0)}


def test_a_check_before_the_start_reads_the_columns_of_a_task(folder: Path, tmp_path: Path):
    settings(folder, tmp_path / "run").check(InputChecks())
    with pytest.raises(PromptError, match="line 1 has no column topic"):
        settings(folder, tmp_path / "run", prompt="{topic}: {source}").check(InputChecks())
