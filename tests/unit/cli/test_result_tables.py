"""What a person sees fits a terminal, whatever the rule is called."""

from io import StringIO

from rich.console import Console, RenderableType

from paceline.cli.result_tables import alignment_table
from paceline.cli.tables import printed
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
