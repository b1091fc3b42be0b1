"""Examples of a task as prompts in tokens, and the scores of answers in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.data.tokens import encode, encode_prompts
from paceline.errors import ContextLengthError
from paceline.models.answer_text import answer_text
from paceline.tasks.base import examples_of, score_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.contract import Tokenizer
    from paceline.tasks.base import Task, TaskExample


@dataclass(frozen=True)
class ExamplePrompts:
    """Examples of a task, and their prompts in the same order.

    Attributes:
        encoder: The prompts are those of an encoder, so answers do not continue them.
    """

    task: Task
    tokenizer: Tokenizer
    examples: Sequence[TaskExample]
    prompts: list[list[int]]
    encoder: bool = field(default=False, kw_only=True)

    def text(self, tokens: Sequence[int], number: int | None = None) -> str:
        """An answer to example `number` as text; None: to any prompt that is not empty."""
        prompt = None if number is None else self.prompts[number]
        return answer_text(self.tokenizer, tokens, () if self.encoder else prompt)

    def score(self, number: int, answer: Sequence[int] | str) -> float | None:
        """Score of an answer to example `number`; None if the task has no metric."""
        if self.task.metric is None:
            return None
        text = answer if isinstance(answer, str) else self.text(answer, number)
        return score_of(self.task, self.examples[number], text)


def example_prompts(
    task: Task,
    tokenizer: Tokenizer,
    count: int,
    *,
    skip: int = 0,
    seed: int = 0,
    limit: int | None = None,
    encoder: bool = False,
) -> ExamplePrompts:
    """`count` examples of the test split after the first `skip`.

    `limit`: the largest number of tokens of a prompt. `encoder`: prompts of an encoder-decoder.

    Raises:
        UsageError: the task cannot be used, or a prompt has more tokens than `limit`.
    """
    examples = examples_of(task, "test", skip + count, seed)[skip:]
    records = [example.record for example in examples]
    if encoder:
        prompts = encode_prompts(records, tokenizer, max_tokens=limit, encoder=True)
    else:
        prompts = [_whole(example, tokenizer, limit) for example in examples]
    return ExamplePrompts(task, tokenizer, examples, prompts, encoder=encoder)


def _whole(example: TaskExample, tokenizer: Tokenizer, limit: int | None) -> list[int]:
    """The prompt of a decoder-only model; truncation would remove its examples or its question."""
    tokens, _ = encode(example.record, tokenizer)
    if limit is not None and len(tokens) > limit:
        raise ContextLengthError(
            f"{example.record.where} has {len(tokens)} tokens, more than max_prompt_tokens "
            f"{limit}; raise it, or use shorter examples"
        )
    return tokens
