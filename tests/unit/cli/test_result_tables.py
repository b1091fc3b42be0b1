"""What a person sees fits a terminal, whatever the rule is called."""

from io import StringIO

from rich.console import Console, RenderableType

from paceline.cli.result_tables import (
    alignment_table,
    frontier_table,
    rule_name,
    sweep_tables,
    trajectory_tables,
)
from paceline.config import validate
from paceline.core.rules import BiLDRule, Lenient, Lossless, Lossy
from paceline.measure.analysis import AnalyzeConfig, FrontierRow, PredictedFrontier
from paceline.measure.results import IntervalRow
from paceline.results.row import Row, Source
from paceline.train.config import Evaluation
from paceline.train.sweep import Sweep, SweepConfig
from support.reports import trajectory_row

RULES = (Lossless(), Lenient("exponential", 0.8), Lossy(0.25, "tuned"), BiLDRule(12.5))


def shown(what: RenderableType) -> list[str]:
    """Its lines on a terminal of eighty columns, which nothing has to be cut for."""
    seen = StringIO()
    Console(file=seen, width=80).print(what)
    text = seen.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text.splitlines()


def test_an_alignment_shows_its_figures_before_and_after_with_intervals():
    before = {"expected_acceptance": 0.31, "greedy_agreement": 0.25, "num_tokens": 480.0}
    before |= {"expected_acceptance_low": 0.285, "expected_acceptance_high": 0.336}
    after = before | {"expected_acceptance": 0.43, "block_efficiency": 1.8125}
    lines = shown(alignment_table({"before": before, "after": after}, Evaluation(gamma=3)))
    assert lines[0].split() == ["before", "after"]
    acceptance = ["expected", "acceptance", "0.310", "(0.285-0.336)", "0.430", "(0.285-0.336)"]
    assert lines[1].split() == acceptance
    assert lines[2].split() == ["greedy", "agreement", "0.250", "0.250"]
    assert lines[3].split() == ["tokens", "per", "target", "call,", "gamma", "3", "-", "1.812"]
    assert "480 held-out tokens" in lines[4]


def test_the_predicted_frontier_fits_eighty_columns():
    rows = [
        FrontierRow(
            rule=rule,
            rejection_rate=IntervalRow(value=0.123, low=0.111, high=0.135),
            tvd=0.25,
            kl=None if number else 12.345,
            surprisal=10.987,
            block_efficiency={3: 2.5},
            best_gamma=3,
            predicted_speedup=1.25 + number / 100,
        )
        for number, rule in enumerate(RULES)
    ]
    names = {"target": "big", "draft": "small", "prompts": "prompts.jsonl"}
    found = PredictedFrontier(
        config=validate(AnalyzeConfig, names),
        num_tokens=640,
        cost_ratio=0.1,
        drafting_cost_ratios={3: 0.1},
        block_cost_ratios={3: 1.1},
        rows=rows,
        environment={},
    )
    lines = shown(frontier_table(found))
    assert "surprisal" in lines[0]
    for number, rule in enumerate(RULES):
        (line,) = (line for line in lines if line.endswith(f"1.{25 + number}0"))
        assert line.startswith(rule_name(rule).split()[0])
        assert "0.12 (0.11-0.14)" in line
        assert " 10.987 " in line


def test_a_trajectory_is_a_table_a_task_and_sampling():
    rows = [
        trajectory_row("runs/pretrain", label, 100 * number, gamma, task=task, **sampling)
        for number, label in enumerate(("start", "step 16384", "end"))
        for task in ("documentation", "questions")
        for sampling in ({}, {"temperature": 0.6, "top_p": 0.9})
        for gamma in (3, 5)
    ]
    lines = shown(trajectory_tables(rows))
    titles = [line for line in lines if line.startswith(("documentation", "questions"))]
    assert len(titles) == len(set(titles)) == 4
    assert sum(line.startswith("pretrain") for line in lines) == len(rows) / 2 / 3 * 2
    assert sum(line.startswith("initial draft") for line in lines) == len(rows) / 2 / 3
    # 8 texts with a tau of 1.8 each; MBSU = 1.8 / (0.2 * 3 + 1)
    assert lines[2].split()[2:] == ["0.500", "3", "1.80", "(1.80-1.80)", "1.12"]
    assert lines[3].split() == ["5", "1.80", "(1.80-1.80)", "0.90"]
    assert lines[5].split() == ["5", "1.80", "(1.80-1.80)", "1.00", "(1.00-1.00)", "0.90"]


def test_runs_of_a_sweep_have_names_that_differ():
    rows = [
        trajectory_row(f"runs/{draft}", "end", 9, 7, draft=draft, trained_on="translation", seed=0)
        for draft in ("gkd", "seq_kd")
    ]
    starts = [trajectory_row(f"runs/{draft}", "start", 0, 7) for draft in ("gkd", "seq_kd")]
    text = " ".join(" ".join(shown(trajectory_tables([*starts, *rows]))).split())
    for words in ("gkd, translation,", "seq kd, translation,", "seed 0 end"):
        assert words in text


def test_a_sweep_says_each_cell_and_what_a_row_differs_by():
    config = validate(
        SweepConfig,
        {
            "output": "sweep",
            "base": {
                "target": "big",
                "draft": "small",
                "data": {"train": "x.jsonl", "held_out": "y.jsonl"},
                "num_steps": 1,
            },
            "rows": {"forward_kl": {}, "negative_log_acceptance": {}},
            "columns": {name: {} for name in ("fixed", "draft", "target", "mix")},
            "seeds": [0, 1],
        },
    )
    rows = [
        Row(
            population="seeds of training",
            units=config.seeds,
            setting={"row": row, "column": column},
            sums={"expected_acceptance": (0.5 + 0.25 * place, 0.51 + 0.25 * place)},
            source=Source(command="paceline sweep"),
        )
        for place, row in enumerate(config.rows)
        for column in config.columns
    ]
    lines = shown(sweep_tables(Sweep.of(rows, config)))
    # t of one degree of freedom, 12.706, times the mean's deviation, 0.005
    assert "0.505 ±0.064" in next(line for line in lines if line.startswith("forward kl"))
    assert sum(line.count("0.250 ±0.000") for line in lines) == 5


def test_drafts_whose_answers_were_scored_have_a_column_of_quality():
    start, end = (trajectory_row("r", label, 9, 7) for label in ("start", "end"))
    scores = {"score": (0.25, 0.5) * 4}
    rows = [row.model_copy(update={"sums": row.sums | scores}) for row in (start, end)]
    _, names, figures, *legend = shown(trajectory_tables(rows))
    assert names.split() == ["draft", "quality", "acceptance", "gamma", "tau", "gain", "MBSU"]
    assert figures.split()[1] == "0.38", "the mean of 0.25 and 0.5"
    assert figures.split()[3] == "0.500"
    assert "quality: mean score of the draft's own answers" in " ".join(legend)
