"""What a person sees fits a terminal, whatever the rule is called."""

from io import StringIO

from rich.console import Console

from paceline.cli.tables import frontier_table, rule_name
from paceline.config import validate
from paceline.core.rules import BiLDRule, Lenient, Lossless, Lossy
from paceline.measure.frontier import AnalyzeConfig, FrontierRow, PredictedFrontier
from paceline.measure.results import IntervalRow

RULES = (Lossless(), Lenient("exponential", 0.8), Lossy(0.25, "tuned"), BiLDRule(12.5))


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
    seen = StringIO()
    Console(file=seen, width=80).print(frontier_table(found))
    text = seen.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "surprisal" in text.splitlines()[0]
    for number, rule in enumerate(RULES):
        (line,) = (line for line in text.splitlines() if line.endswith(f"1.{25 + number}0"))
        assert line.startswith(rule_name(rule).split()[0])
        assert "0.12 (0.11-0.14)" in line
        assert " 10.987 " in line
