"""Scores of the answers that a draft writes by itself, without the target.

Paper: Zhou et al. 2023, section 5.2, figure 5a: quality of drafts against block efficiency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.measure.pair import sample_texts
from paceline.tasks.base import example_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.measure.pair import Writing
    from paceline.models.contract import Model, Tokenizer
    from paceline.tasks import Task
    from paceline.tasks.base import ExamplePrompts


def scored_examples(
    tasks: Mapping[str, Task],
    tokenizer: Tokenizer,
    count: int,
    *,
    skip: int,
    seed: int,
    encoder: bool,
) -> dict[str, ExamplePrompts]:
    """`count` examples of each task, as prompts.

    Raises:
        UsageError: a task has no metric or fewer examples.
    """
    for name, task in tasks.items():
        if task.metric is None:
            raise UsageError(f"the task {name} has no metric; move it to tasks, as {{path: FILE}}")
    return {
        name: example_prompts(task, tokenizer, count, skip=skip, seed=seed, encoder=encoder)
        for name, task in tasks.items()
    }


def own_scores(
    draft: Model, examples: ExamplePrompts, writing: Writing, *, skipped: int = 0
) -> tuple[float, ...]:
    """Score of the draft's own answer to each example, 0 to 1.

    `draft`: prepared for decoding. `skipped`: as in `sample_texts`.
    """
    answers: list[list[int]] = []
    sample_texts(draft, examples.prompts, writing, answers, skipped=skipped)
    scores = [examples.score(number, answer) for number, answer in enumerate(answers)]
    return tuple(round(score, 6) for score in scores if score is not None)
