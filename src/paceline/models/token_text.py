"""The tokens of prompts, as an engine makes them, and the text of new tokens.

The text of new tokens is that of prompt and answer without that of the prompt. Tokens that are
decoded alone have another text: most decoders of SentencePiece and WordPiece drop the space in
front of a text, and the bytes of a character may lie in several tokens.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, cast

from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.models.contract import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no whole character


def prompt_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, where: str, *, rendered: bool = False
) -> list[int]:
    """The tokens of a prompt with the tokenizer's special tokens.

    `rendered`: a chat template has put these into the text. `where`: the prompt, for errors.
    """
    tokens = tokens_of(text, tokenizer, special=not rendered)
    bos = tokenizer.bos_token_id
    if bos is not None and tokens[:2] == [bos, bos]:
        tokens = tokens[1:]  # a template was applied to the text
    if not tokens:
        raise PromptError(f"{where} has no tokens; a prompt needs at least one")
    return tokens


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> list[int]:
    """The tokens of a text; `special`: with the special tokens that the tokenizer adds."""
    # verbose=False: no warning for documents longer than the context; they are split later.
    found = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return cast("list[int]", found)


def following_tokens(
    prompt: str,
    prompt_tokens: Sequence[int],
    text: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """The tokens of `text` behind those of the prompt, all without the tokenizer's special tokens.

    They are the tokens of prompt and text together behind the prompt's own tokens. A text on its
    own can begin with other tokens: SentencePiece puts a space in front of it. Where a token of the
    whole crosses the border, such as ` cats` of `4 c` and `ats`, they are those of the text alone.
    """
    own = list(prompt_tokens)
    whole = tokens_of(prompt + text, tokenizer)
    return whole[len(own) :] if whole[: len(own)] == own else tokens_of(text, tokenizer)


def answer_text(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    prompt: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """The text of `tokens` behind `prompt`, as servers give it.

    `prompt`: the decoder's tokens before the first new one.
    """
    whole = _decoded(tokenizer, [*prompt, *tokens], skip=skip_special_tokens)
    return behind(_decoded(tokenizer, prompt, skip=skip_special_tokens), whole)


class AnswerStream:
    """The text of an answer, token by token.

    Each token is decoded together with those that gave the last text, so that its cost does not
    grow with the text. Prompts are decoded once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._num_shown = len(self._tokens)
        self._shown = _decoded(tokenizer, self._tokens)

    def add(self, token: int) -> str:
        """The text that the token completes; empty within a character."""
        self._tokens.append(token)
        whole = _decoded(self._tokenizer, self._tokens)
        text = behind(self._shown, whole)
        if not text or whole.endswith(_INCOMPLETE):
            return ""
        newest = self._tokens[self._num_shown :]
        shown = _decoded(self._tokenizer, newest)
        if not shown.startswith(_INCOMPLETE):  # else the prompt ended within a character
            self._tokens, whole = newest, shown
        self._num_shown, self._shown = len(self._tokens), whole
        return text


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int], *, skip: bool = True) -> str:
    # Servers do not clean up; it removes spaces that the model has written.
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str), "one sequence is one text"
    return text


def behind(before: str, whole: str) -> str:
    """The text without what it has in common with `before` from its start."""
    if whole.startswith(before):
        return whole[len(before) :]
    # `before` ends within a character, which `whole` completes
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[sum(1 for _ in same) :]
