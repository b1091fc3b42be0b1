"""From records to tokens: prompts for decoding and measuring, pairs for training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

from paceline.data.prompts import CorpusConfig, Record, Text, read_records
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_MAX_CHARACTERS = 10_000_000  # fast tokenizers take some 150 bytes for each


def read_prompts(
    corpus: CorpusConfig | str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """The prompts of a corpus as tokens.

    A document is cut to its first `max_tokens` tokens; a prompt or chat that is longer loses its
    beginning, with a warning, since what is asked stands at its end. Completions are left out.

    Raises:
        PromptError: as `read_records`.
    """
    return encode_prompts(read_records(corpus), tokenizer, max_tokens=max_tokens)


def encode_prompts(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> list[list[int]]:
    """The same, of records that were read."""
    prompts: list[list[int]] = []
    num_cut = 0
    for record in records:
        tokens, _ = encode(record, tokenizer)
        if max_tokens is not None and len(tokens) > max_tokens:
            if record.kind == "document":
                tokens = tokens[:max_tokens]
            else:
                tokens = tokens[-max_tokens:]
                num_cut += 1
        prompts.append(tokens)
    warn_of_cut_prompts(num_cut, len(prompts), max_tokens)
    return prompts


def read_texts(
    corpus: CorpusConfig | str | Path, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    """All tokens of each record, prompt and completion together.

    Raises:
        PromptError: as `read_records`.
    """
    for record in read_records(corpus):
        tokens, completion = encode(record, tokenizer)
        yield tokens + (completion or [])


def warn_of_cut_prompts(num_cut: int, num_prompts: int, max_tokens: int | None) -> None:
    """Say once how many prompts lost their beginning."""
    if num_cut:
        warnings.warn(
            f"{num_cut} of {num_prompts} prompts are longer than {max_tokens} tokens and lose "
            "their beginning; raise the limit to keep them whole",
            stacklevel=3,
        )


def encode(
    record: Record, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int] | None]:
    """Tokens of the prompt (or document) and of the completion, if there is one.

    Prompt and completion are tokenised apart, so the border is where a decoder would start.
    """
    if record.kind == "chat":
        prompt_text, completion_text = _render_chat(record, tokenizer)
        # The template wrote the special tokens itself.
        prompt = _encode_text(prompt_text, record, tokenizer, special=False)
    else:
        prompt_text, completion_text = record.text, record.completion
        prompt = _encode_text(prompt_text, record, tokenizer, special=True)
    if not prompt:
        raise PromptError(f"{record.where} has no token in it; a prompt needs at least one")
    if completion_text is None:
        return prompt, None
    completion = _encode_text(completion_text, record, tokenizer, special=False)
    eos = tokenizer.eos_token_id
    if eos in completion:
        # A chat template writes a line break after the token that ends the answer.
        completion = completion[: completion.index(eos) + 1]
    return prompt, completion


def _encode_text(
    text: Text, record: Record, tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> list[int]:
    if isinstance(text, str):
        if len(text) > _MAX_CHARACTERS:
            raise PromptError(
                f"{record.where} has a text of {len(text):,} characters, and one of more than "
                f"{_MAX_CHARACTERS:,} takes gigabytes to tokenise; split it into documents"
            )
        # verbose=False: a document may well be longer than the context, it is cut later.
        tokens = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return cast("list[int]", tokens)
    size = len(tokenizer)
    if max(text) >= size:
        raise PromptError(
            f"{record.where} has the token {max(text)}, but the tokenizer has {size}; "
            "tokenise the text with the target's tokenizer"
        )
    return text


def _render_chat(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """A closing answer is the completion; everything before it is the prompt."""
    if not tokenizer.chat_template:
        raise PromptError(
            f"{record.where} has messages, but the tokenizer has no chat template; give the text as it "
            "is, or use a model with a chat template"
        )
    messages = list(record.messages)
    answered = messages[-1]["role"] == "assistant"
    try:
        prompt = _apply_template(tokenizer, messages[:-1] if answered else messages, asks=True)
        whole = _apply_template(tokenizer, messages, asks=False) if answered else ""
    except Exception as error:
        # Templates are programs and raise what they like.
        reason = " ".join(str(error).split())
        raise PromptError(f"{record.where} does not fit the chat template: {reason}") from None
    if not answered:
        return prompt, None
    if whole.startswith(prompt) and len(whole) > len(prompt):
        return prompt, whole[len(prompt) :]
    # Some templates rewrite earlier turns once an answer follows.
    return prompt, messages[-1]["content"]


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, asks: bool
) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    assert isinstance(text, str)
    return text
