"""Text in, text out: the tokens of texts and chats, and the text that decoding adds to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

from paceline.decode.text import Block, Generation, Source, summary
from paceline.errors import PromptError, shorten
from paceline.models.chat_text import HALF_PAIR, Messages, chat_prompt, messages_of
from paceline.models.token_text import AnswerStream, answer_text, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.decode.text import Text
    from paceline.models.contract import Model, Tokenizer

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`; the last one is not the assistant's."""

COLOURS: dict[Source, str | None] = {
    "prefill": None,
    "accepted": "green",
    "recovered": "red",
    "bonus": "blue",
    "kept": "cyan",
    "deferred": "magenta",
}
"""The colour of a token's text by the source of the token, for terminals."""


class Piece(NamedTuple):
    """The text that a token adds.

    Attributes:
        text: Empty if the token ends within a character; the next one then has all of it.
        source: Where the token came from, such as `accepted`, `recovered` or `bonus`.
        token: Its id.
        block: The block that added it.
    """

    text: str
    source: Source
    token: int
    block: Block


@dataclass(frozen=True, repr=False)
class TextGeneration(Generation):
    """A finished text whose prompt was a text or a chat.

    Attributes:
        text: What the new tokens add to the prompt, without special tokens.
        pieces: The same by token; bytes at the end that are no whole character are left out.
    """

    text: str
    pieces: tuple[Piece, ...]

    def __repr__(self) -> str:
        return summary(self, self.text)


def is_text(prompt: Any) -> TypeGuard[str | Chat]:
    """Whether a prompt is one text or one chat, and not a list of token ids or of prompts."""
    if isinstance(prompt, str):
        return True
    parts = cast("Sequence[object]", prompt) if isinstance(prompt, list | tuple) else ()
    return bool(parts) and isinstance(parts[0], Mapping)


def as_tokens(prompt: Any, model: Model, where: str) -> list[int]:
    """The tokens of a text or a chat as an engine makes them, or the token ids that are given.

    Raises:
        PromptError: the model has no tokenizer, the prompt cannot be tokenised, or a chat ends
            with the assistant's message.
    """
    if not is_text(prompt):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise PromptError(
                f"{where} is {shorten(repr(prompt))}; give a list of texts, chats or lists of "
                "token ids"
            ) from None
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise PromptError(
            f"{where} is {shorten(repr(prompt))}, but the target has no tokenizer; give lists of "
            "token ids, or give wrap_model its tokenizer"
        )
    if isinstance(prompt, str):
        if HALF_PAIR.search(prompt):
            raise PromptError(f"{where} has half of a UTF-16 pair; repair the text")
        return prompt_tokens(prompt, tokenizer, where)
    messages = messages_of(list(prompt), where)
    if messages[-1]["role"] == "assistant":
        raise PromptError(
            f"{where} ends with the assistant's message; end it with the message to answer"
        )
    rendered = chat_prompt(Messages(where, messages), tokenizer)
    return prompt_tokens(rendered, tokenizer, where, rendered=True)


def pieces_of(
    blocks: Iterable[Block], tokenizer: Tokenizer, context: Sequence[int]
) -> Iterator[Piece]:
    """The text of each token of the blocks behind a context, the decoder's tokens before them."""
    written = AnswerStream(tokenizer, context)
    for block in blocks:
        for token, source in zip(block.tokens, block.sources, strict=True):
            yield Piece(written.add(token), source, token, block)


def with_text(text: Text, tokenizer: Tokenizer) -> TextGeneration:
    """A finished text of a prompt that was a text or a chat."""
    found = text.finish()
    spoken = answer_text(tokenizer, found.tokens, text.context)
    pieces = tuple(pieces_of(text.blocks, tokenizer, text.context))
    return TextGeneration(found.tokens, found.stop_reason, found.stats, spoken, pieces)
