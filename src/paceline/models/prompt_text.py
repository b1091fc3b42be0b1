"""The tokens of prompts, as an engine makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paceline.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
