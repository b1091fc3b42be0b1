"""What a person sees fits a terminal, whatever the rule is called."""

from io import StringIO

from rich.console import Console, RenderableType

from paceline.cli.result_tables import alignment_table, plan_table
from paceline.cli.tables import printed
from paceline.data.distillation_data import RunPlan
from paceline.train.config import Evaluation
from paceline.view.tables import trajectory_tables
from support.reports import trajectory_row


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
    assert lines[0] == "On 480 held-out tokens of the target, temperature 1, gamma 3."
    assert lines[1].split() == ["figure", "before", "after"]
    acceptance = ["expected", "acceptance", "0.310", "(0.285-0.336)", "0.430", "(0.285-0.336)"]
    assert lines[2].split() == acceptance
    assert lines[3].split() == ["greedy", "agreement", "0.250", "0.250"]
    assert lines[4].split() == ["tokens", "per", "target", "call", "-", "1.812"]
    assert "tokens per target call: new tokens / target calls" in " ".join(lines)


def test_a_plan_says_what_a_run_takes_with_intervals():
    """One answer in a hundred was measured; 2 million tokens take 2.5 hours."""
    plan = {
        "num_records": 20_000,
        "num_measured": 200,
        "measured_s": 90.0,
        "prompt_tokens": 1_200_000,
        "tokens_per_answer": {"value": 100, "low": 90, "high": 110},
        "new_tokens": {"value": 2e6, "low": 1.8e6, "high": 2.2e6},
        "tokens_per_s": 222.25,
        "hours": {"value": 2.5, "low": 2.25, "high": 2.75},
        "bytes_per_token": 6.5,
        "bytes": {"value": 1.3e7, "low": 1.17e7, "high": 1.43e7},
        "cost": {"value": 5, "low": 4.5, "high": 5.5},
    }
    lines = shown(plan_table(RunPlan.model_validate(plan)))
    assert lines[0].startswith("200 answers measured in 90 s: 222.2 tokens/s, 6.5 bytes")
    cells = [" ".join(line.split()) for line in lines[2:8]]
    assert cells == [
        "answers 20,000",
        "tokens in prompts 1,200,000",
        "tokens, generated 2,000,000 (1,800,000 to 2,200,000)",
        "hours 2.5 (2.2 to 2.8)",
        "size, MB 13.0 (11.7 to 14.3)",
        "cost, as --price 5.00 (4.50 to 5.50)",
    ]
    plan["hours"] = {name: 0.1 * value for name, value in plan["hours"].items()}
    plan["bytes"] = {name: 1000 * value for name, value in plan["bytes"].items()}
    text = " ".join(" ".join(shown(plan_table(RunPlan.model_validate(plan)))).split())
    assert "minutes 15.0 (13.5 to 16.5) size, GB 13.0 (11.7 to 14.3)" in text


def test_a_trajectory_is_a_table_a_task_and_sampling():
    rows = [
        trajectory_row("runs/pretrain", label, 100 * number, gamma, task=task, **sampling)
        for number, label in enumerate(("start", "step 16384", "end"))
        for task in ("documentation", "questions")
        for sampling in ({}, {"temperature": 0.6, "top_p": 0.9})
        for gamma in (3, 5)
    ]
    lines = shown(printed(*trajectory_tables(rows)))
    titles = [line for line in lines if line.startswith(("documentation", "questions"))]
    assert len(titles) == len(set(titles)) == 4
    assert sum(line.startswith("pretrain") for line in lines) == len(rows) / 2 / 3 * 2
    assert sum(line.startswith("initial draft") for line in lines) == len(rows) / 2 / 3
    # 8 texts with a tau of 1.8 each; MBSU = 1.8 / (0.2 * 3 + 1)
    first, second, _, end = (line.split() for line in lines[3:7])
    assert first[2:] == ["0.500", "3", "1.80", "(1.80-1.80)", "-", "1.12"]
    assert second == ["5", "1.80", "(1.80-1.80)", "-", "0.90"]
    assert end == ["5", "1.80", "(1.80-1.80)", "1.00", "(1.00-1.00)", "0.90"]


def test_runs_have_the_names_of_their_directories():
    names = ("gkd/seed-0", "seq_kd/seed-0")
    rows = [trajectory_row(f"runs/{name}", "end", 9, 7, draft=name) for name in names]
    starts = [trajectory_row(f"runs/{name}", "start", 0, 7) for name in names]
    text = " ".join(" ".join(shown(printed(*trajectory_tables([*starts, *rows])))).split())
    for words in ("gkd/seed-0", "seq kd/seed-0"):
        assert words in text


def test_drafts_whose_answers_were_scored_have_a_column_of_quality():
    start, end = (trajectory_row("r", label, 9, 7) for label in ("start", "end"))
    scores = {"score": (0.25, 0.5) * 4}
    rows = [row.model_copy(update={"sums": row.sums | scores}) for row in (start, end)]
    lines = shown(printed(*trajectory_tables(rows)))
    (figures,) = (line.split() for line in lines if line.startswith("r end"))
    names = ["draft", "quality", "acceptance", "gamma", "target", "call", "gain", "MBSU"]
    assert lines[2].split() == names
    assert figures[2] == "0.38", "the mean of 0.25 and 0.5"
    assert figures[4] == "0.500"
    assert "quality: mean score of the answers" in map(str.rstrip, lines)
