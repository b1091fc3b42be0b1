"""Training text that servers of the target generate, in rounds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.data.examples import top_scores_of
from paceline.data.prompts import TopTokens
from paceline.data.replay import TargetRounds
from paceline.data.sources import rows_of
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import tokens_of
from paceline.errors import EngineError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.data.collate import Row
    from paceline.engines.texts import OpenAIWriter, Written


class ServedRounds(TargetRounds):
    """Corpus prompts continued by servers of the target; see `TargetRounds`.

    A resumed run asks for its current round again. A server may then sample other tokens.
    """

    def __init__(
        self,
        writer: OpenAIWriter,
        tokenizer: PreTrainedTokenizerBase,
        *arguments: Any,
        **named: Any,
    ) -> None:
        """`arguments`: those of `TargetRounds`; its model gives the layout of rows alone.

        Raises:
            UsageError: the client's package or the key's variable is missing.
        """
        super().__init__(*arguments, **named)
        self._tokenizer = tokenizer
        self._servers = TextServers(writer, self._tokenize)

    def _tokenize(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(self, number: int, count: int) -> list[Row]:
        prompts = self._prompts_of(number, count)
        rng = named_generator(self.stream.seed, "served round", number)
        seeds = torch.randint(2**31, (self.rounds.rows,), generator=rng)[self.stream.mine].tolist()
        requests = [
            Request(prompt, self.max_new_tokens, self.sampling, seed)
            for prompt, seed in zip(prompts, seeds, strict=False)
        ]
        written: dict[int, Written] = {}

        def keep(index: int, answer: Written) -> None:
            written[index] = answer
            self.progress("generating text", len(written), len(requests))

        self._servers.write(requests, keep)
        answers = [written[index] for index in range(len(requests))]
        completions = [self._completion(answer) for answer in answers]
        rows = rows_of(self.model, prompts, completions)
        return [_with_top(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def _completion(self, answer: Written) -> list[int]:
        """The answer's tokens; of an empty one, the end-of-text token."""
        end = cast("int | None", self._tokenizer.eos_token_id)
        tokens = tokens_of(answer, self._tokenize, end)[: self.max_new_tokens]
        if not tokens and end is None:
            raise EngineError(
                "a server answered a prompt with an empty text, which cannot be trained on, as "
                "the tokenizer has no end-of-text token; use other prompts"
            )
        return tokens or [cast("int", end)]


def _with_top(row: Row, answer: Written) -> Row:
    if answer.top is None:
        return row
    count = len(row.tokens) - row.trained_from
    top = answer.top or [[]]  # an empty answer, of which the end-of-text token is left
    tokens = [[token for token, _ in each] for each in top]
    log_probs = [[value for _, value in each] for each in top]
    return dataclasses.replace(row, top=top_scores_of(TopTokens(tokens, log_probs), count))
