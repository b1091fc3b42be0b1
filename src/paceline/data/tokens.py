"""Tokenises records: prompts for decoding and measuring, prompt-completion pairs for training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

from paceline.data.prompts import CorpusConfig, Record, Text, read_records
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_MAX_CHARACTERS = 10_000_000  # fast tokenizers need about 150 bytes per character


def read_prompts(
    corpus: CorpusConfig | str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    encoder: bool = False,
) -> list[list[int]]:
    """Read the prompts of a corpus as tokens, without completions.

    Documents longer than `max_tokens` keep their first tokens. Prompts and chats keep their last
    tokens, where the question usually is, and a warning counts those that were truncated. Inputs of
    an `encoder` keep their first tokens and those that the tokenizer appends, also with a warning.

    Raises:
        PromptError: as `read_records`, or a record cannot be tokenised.
    """
    records = read_records(corpus)
    return encode_prompts(records, tokenizer, max_tokens=max_tokens, encoder=encoder)


def encode_prompts(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    encoder: bool = False,
) -> list[list[int]]:
    """Tokenise the prompts of records; see `read_prompts`."""
    prompts: list[list[int]] = []
    num_cut = 0
    for record in records:
        tokens, _ = encode(record, tokenizer)
        if max_tokens is not None and len(tokens) > max_tokens:
            num_cut += encoder or record.kind != "document"
            tokens = truncated(tokens, max_tokens, record, tokenizer, encoder=encoder)
        prompts.append(tokens)
    warn_of_cut_prompts(num_cut, len(prompts), max_tokens, encoder=encoder)
    return prompts


def truncated(
    tokens: list[int],
    limit: int,
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    *,
    encoder: bool,
) -> list[int]:
    """At most `limit` tokens of a prompt; see `read_prompts`."""
    if len(tokens) <= limit:
        return tokens
    if encoder:
        special = set(tokenizer.all_special_ids)
        text = len(tokens)
        while text > 0 and tokens[text - 1] in special:
            text -= 1
        ends = tokens[text:]  # </s> of T5 and BART; </s> and the language of mBART
        return [*tokens[: max(limit - len(ends), 0)], *ends][:limit]
    return tokens[:limit] if record.kind == "document" else tokens[-limit:]


def read_texts(
    corpus: CorpusConfig | str | Path, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    """Yield all tokens of each record, prompt and completion concatenated.

    Raises:
        PromptError: as `read_prompts`.
    """
    for record in read_records(corpus):
        tokens, completion = encode(record, tokenizer)
        yield tokens + (completion or [])


def warn_of_cut_prompts(
    num_cut: int, num_prompts: int, max_tokens: int | None, *, encoder: bool = False
) -> None:
    """Warn once if prompts were truncated."""
    if num_cut:
        side = "right" if encoder else "left"
        warnings.warn(
            f"{num_cut} of {num_prompts} prompts are longer than {max_tokens} tokens and are "
            f"truncated on the {side}; raise the limit to keep them whole",
            stacklevel=3,
        )


def encode(
    record: Record, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int] | None]:
    """Tokenise the prompt (or document) and the completion, if there is one.

    They are tokenised separately, so that the prompt's tokens are the ones a decoder would get.
    """
    if record.kind == "chat":
        prompt_text, completion_text = _render_chat(record, tokenizer)
        # The template includes the special tokens.
        prompt = _encode_text(prompt_text, record, tokenizer, special=False)
    else:
        prompt_text, completion_text = record.text, record.completion
        prompt = _encode_text(prompt_text, record, tokenizer, special=True)
    if not prompt:
        raise PromptError(f"{record.where} has no tokens; a prompt needs at least one")
    if completion_text is None:
        return prompt, None
    completion = _encode_text(completion_text, record, tokenizer, special=False, as_target=True)
    eos = tokenizer.eos_token_id
    if eos in completion:
        # Chat templates add a line break after the end-of-text token.
        completion = completion[: completion.index(eos) + 1]
    return prompt, completion


def _encode_text(
    text: Text,
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special: bool,
    as_target: bool = False,
) -> list[int]:
    if isinstance(text, str):
        if len(text) > _MAX_CHARACTERS:
            raise PromptError(
                f"{record.where} has a text of {len(text):,} characters, more than the limit of "
                f"{_MAX_CHARACTERS:,}; split it into several documents"
            )
        # verbose=False: no warning for documents longer than the context; they are split later.
        # Some translation models tokenise the target language differently.
        texts: dict[str, Any] = {"text_target" if as_target else "text": text}
        tokens = tokenizer(**texts, add_special_tokens=special, verbose=False)["input_ids"]
        return cast("list[int]", tokens)
    if max(text) >= len(tokenizer):
        raise PromptError(
            f"{record.where} has the token {max(text)}, but the tokenizer has {len(tokenizer)} "
            "tokens; tokenise the text with the target's tokenizer"
        )
    return text


def _render_chat(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """Prompt and completion of a chat; a final assistant message is the completion."""
    if not tokenizer.chat_template:
        raise PromptError(
            f"{record.where} is a chat, but the tokenizer has no chat template; copy the model's "
            "chat_template.jinja beside it, or use plain prompts"
        )
    messages = list(record.messages)
    answered = messages[-1]["role"] == "assistant"
    try:
        prompt = _apply_template(tokenizer, messages[:-1] if answered else messages, open_turn=True)
        whole = _apply_template(tokenizer, messages, open_turn=False) if answered else ""
    except Exception as error:  # a template is a program and can raise anything
        reason = " ".join(str(error).split())
        raise PromptError(f"{record.where} does not fit the chat template: {reason}") from None
    if not answered:
        return prompt, None
    if whole.startswith(prompt) and len(whole) > len(prompt):
        return prompt, whole[len(prompt) :]
    # Some templates render earlier turns differently once an answer follows.
    return prompt, messages[-1]["content"]


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, open_turn: bool
) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn)
    assert isinstance(text, str)
    return text
