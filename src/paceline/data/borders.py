"""Tokens of a text that goes on behind a prompt: those of both together, behind the prompt's."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

_CONTEXT = 8  # tokens in front of a text that is decoded, which decide about its first space
_BEFORE = ("\n", "a", ".", " ", "字")  # texts that a piece of a word can follow
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def following_tokens(
    prompt: str,
    prompt_tokens: Sequence[int],
    text: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """The tokens of `text` behind those of the prompt, all without the tokenizer's special tokens.

    They are the tokens of prompt and text together behind the prompt's own tokens. A text on its
    own can begin with other tokens: SentencePiece puts a space in front of it.

    A token of the whole can cross the border: of `4 c` and `ats`, ` cats`. The prompt keeps its own
    tokens, because they are what a decoder gets. The rest of the token that crosses, `ats`, is
    tokenised as the middle of a text, and the tokens of the whole follow. lm-evaluation-harness and
    TRL count the prompt's tokens off the whole's instead; their text then lacks or repeats
    characters at the border.

    Raises:
        PromptError: the tokenizer has no tokens for the rest of the token that crosses.
    """
    own = list(prompt_tokens)
    whole = tokens_of(prompt + text, tokenizer)
    if whole[: len(own)] == own:
        return whole[len(own) :]
    pairs = zip(own, whole, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    context = own[max(same - _CONTEXT, 0) : same]
    start = _decode(context + own[same:], tokenizer)
    for end in range(same, len(whole) + 1):
        found = _decode(context + whole[same:end], tokenizer)
        if found.startswith(start) and not found.endswith(_UNKNOWN):
            rest = inner_tokens(own, found.removeprefix(start), tokenizer)
            return rest + whole[end:]
    return inner_tokens(own, text, tokenizer)


def inner_tokens(before: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a text that goes on directly behind the tokens `before`.

    Raises:
        PromptError: the tokenizer has none, such as one that lacks the middle of a word.
    """
    if not text:
        return []
    context = list(before[-_CONTEXT:])
    wanted = _decode(context, tokenizer) + text
    for start in _BEFORE:
        head, whole = (tokens_of(part, tokenizer) for part in (start, start + text))
        found = whole[len(head) :]
        if whole[: len(head)] == head and _decode(context + found, tokenizer) == wanted:
            return found
    raise PromptError(
        f"the tokenizer cannot go on with {text[:20]!r} behind {wanted[: -len(text)][-20:]!r}; end "
        "the prompt where a word ends"
    )


def tokens_of(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special: bool = False,
) -> list[int]:
    """The tokens of a text; `special`: with the special tokens that the tokenizer adds."""
    # verbose=False: no warning for documents longer than the context; they are split later.
    found = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return cast("list[int]", found)


def _decode(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    found = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return cast("str", found)
