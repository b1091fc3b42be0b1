"""Tokenises records: prompts for decoding and measuring, prompt-completion pairs for training.

The answers of chats are taken as the tokenizer's template renders them behind their prompts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paceline.data.prompts import read_records
from paceline.errors import PromptError
from paceline.models.chat_text import REASONING, ChatRendering, Messages, chat_prompt, text_of
from paceline.models.compatibility import written_vocabulary
from paceline.models.token_text import behind, following_tokens, prompt_tokens, tokens_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import CorpusConfig, Record, Text


# a tag at the end of a prompt, which opens thoughts
_OPENING = re.compile(r"([<\[(◁])([^\s<>\[\]()◁▷/|\uff5c]+)([>\])▷])\s*$")
_THOUGHT, _ANSWER = "A thought.", "An answer."  # of a chat that tells what a template renders


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


def asked(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, chat: bool | None
) -> list[Record]:
    """Records as an engine is asked: as texts, or by the chat template, as chats always are.

    `chat`: texts are messages of the user; None: prompts are, if the tokenizer has a template,
    while documents are continued.

    Raises:
        PromptError: a record has tokens, and `chat` is true.
    """
    if chat is None and tokenizer.chat_template:
        return [
            record.as_chat() if record.kind == "prompt" and isinstance(record.text, str) else record
            for record in records
        ]
    return [record.as_chat() if chat else record for record in records]


def encode_prompts(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    encoder: bool = False,
    setting: str = "max_prompt_tokens",
) -> list[list[int]]:
    """Tokenise the prompts of records; see `read_prompts`.

    `setting`: the configuration key of `max_tokens`, for the warning.
    """
    prompts: list[list[int]] = []
    cut: list[int] = []
    for record in records:
        tokens = encode_prompt(record, tokenizer)
        if max_tokens is not None and len(tokens) > max_tokens:
            if encoder or record.kind != "document":
                cut.append(len(tokens))
            tokens = truncated(tokens, max_tokens, record, tokenizer, encoder=encoder)
        prompts.append(tokens)
    side = "right" if encoder else "left"
    warn_of_cut(cut, f"{len(prompts)} prompts", max_tokens, setting, side)
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
    if record.kind == "document":
        return tokens[:limit]
    first = _first_tokens(tokens, tokenizer)
    kept = limit - len(first)
    return [*first, *tokens[-kept:]] if kept > 0 else tokens[-limit:]


def _first_tokens(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that every text of the model begins with, if this one does.

    They are those that the tokenizer adds, or a BOS that a template puts at the start of the text
    only: some models begin each turn with their BOS.
    """
    pairs = zip(tokens, tokens_of("", tokenizer, special=True), strict=False)
    added = [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    bos = cast("int | None", tokenizer.bos_token_id)
    if added or bos is None:
        return added
    return [bos] if tokens[0] == bos and bos not in tokens[1:] else []


def read_texts(
    corpus: CorpusConfig | str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: Sequence[int] = (),
) -> Iterator[list[int]]:
    """Yield all tokens of each record, prompt and completion concatenated.

    Raises:
        PromptError: as `read_prompts`.
    """
    for record in read_records(corpus, skip_empty=True):
        turn = last_turn(record, tokenizer, eos_token_ids=eos_token_ids)
        yield turn.prompt + (turn.completion or [])


def warn_of_cut(
    lengths: Sequence[int],
    counted: str,
    limit: int | None,
    setting: str = "max_prompt_tokens",
    side: str = "left",
) -> None:
    """Warn once if texts were truncated; `lengths`: theirs, `counted`: such as `8 prompts`."""
    if lengths:
        warnings.warn(
            f"{len(lengths)} of {counted} are longer than {limit} tokens and are truncated on the "
            f"{side}; raise {setting} to keep them whole (the longest has {max(lengths)})",
            stacklevel=3,
        )


class Turn(NamedTuple):
    """A prompt and what follows it.

    Attributes:
        prompt: Tokens that a decoder gets.
        completion: Tokens behind them; None if there are none.
        ended: True if nothing may follow the completion.
    """

    prompt: list[int]
    completion: list[int] | None = None
    ended: bool = False


def last_turn(
    record: Record, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Sequence[int] = ()
) -> Turn:
    """The last of the `turns` of a record; a chat has its earlier answers in the prompt."""
    encoding = _Encoding(record, tokenizer, eos_token_ids)
    if record.kind != "chat":
        return encoding.text_turn()
    last = len(record.messages) - 1
    if record.messages[last]["role"] == "assistant":
        return encoding.chat_turn(last)
    return Turn(encode_prompt(record, tokenizer))


def encode_prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenise the prompt (or document) as an engine does.

    A chat's prompt ends where its last answer starts. Special tokens in a text are read as such.
    """
    if record.kind == "chat":
        answered = record.messages[-1]["role"] == "assistant"
        text: Text = chat_prompt(record, tokenizer, len(record.messages) - answered)
    else:
        text = record.text
    return _Encoding(record, tokenizer).prompt(text)


def turns(
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: Sequence[int] = (),
    encoder: bool = False,
) -> list[Turn]:
    """The prompts of a record, each with its completion.

    A chat has a turn for each answer of the assistant, whose prompt is the chat before it as an
    engine would get it, and one without a completion if it ends with another message. The other
    records have one turn. The completion's tokens are those behind the prompt in the whole text;
    see `following_tokens`. For an `encoder`, they are a text of their own.

    `eos_token_ids` are the model's stop tokens, which end answers.

    Raises:
        PromptError: the record cannot be tokenised.
    """
    encoding = _Encoding(record, tokenizer, eos_token_ids, encoder=encoder)
    if record.kind != "chat":
        return [encoding.text_turn()]
    found = [encoding.chat_turn(index) for index in record.answers]
    if record.messages[-1]["role"] != "assistant":
        found.append(Turn(encode_prompt(record, tokenizer)))
    return found


class _Encoding:
    """How one record becomes tokens; see `turns`."""

    def __init__(
        self,
        record: Record,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int] = (),
        *,
        encoder: bool = False,
    ) -> None:
        self.record = record
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.encoder = encoder

    def chat_turn(self, index: int) -> Turn:
        """The answer in message `index`, behind its prompt."""
        text = chat_prompt(self.record, self.tokenizer, index)
        prompt = self.prompt(text)
        rendering = _Rendering(self.record, self.tokenizer)
        answer, ended = rendering.answer(index, text, tuple(self.eos_token_ids))
        if self.encoder:
            return Turn(prompt, self._target(answer), ended)
        return Turn(prompt, self._following(text, prompt, answer), ended)

    def text_turn(self) -> Turn:
        """The completion of a prompt, or a document."""
        text, completion = self.record.text, self.record.completion
        prompt = self.prompt(text)
        if completion is None:
            return Turn(prompt)
        eos = cast("int | None", self.tokenizer.eos_token_id)
        ends = {*self.eos_token_ids, eos}
        if not isinstance(completion, str):
            tokens = self._checked(completion, written=True)
            if eos in tokens:
                tokens = tokens[: tokens.index(eos) + 1]
        else:
            if self.encoder:
                tokens = self._target(completion)
            elif isinstance(text, str):
                tokens = self._following(text, tokens_of(text, self.tokenizer), completion)
            else:
                tokens = self._following(cast("str", self.tokenizer.decode(text)), text, completion)
            tokens = _ended(tokens, ends, self.tokenizer)
        # a normalizer may leave nothing of a completion
        return Turn(prompt, tokens, ended=bool(tokens) and tokens[-1] in ends)

    def prompt(self, text: Text) -> list[int]:
        """The tokens of a prompt with the tokenizer's special tokens."""
        if isinstance(text, str):
            where, rendered = self.record.where, self.record.kind == "chat"
            return prompt_tokens(text, self.tokenizer, where, rendered=rendered)
        return self._checked(text)

    def _following(self, prompt: str, prompt_tokens: list[int], text: str) -> list[int]:
        return following_tokens(prompt, prompt_tokens, text, self.tokenizer)

    def _target(self, text: str) -> list[int]:
        """Tokens of a decoder of its own; some translation models tokenise it differently."""
        tokenize = cast("Any", self.tokenizer)
        return tokenize(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]

    def _checked(self, tokens: list[int], *, written: bool = False) -> list[int]:
        """Token ids of a text; `written`: of one that the model writes."""
        two = written and getattr(self.tokenizer, "separate_vocabs", False)
        if max(tokens) < len(self.tokenizer) and not two:
            return tokens
        # a vocabulary may have gaps, and to ask for it takes milliseconds
        known = written_vocabulary(self.tokenizer) if written else self.tokenizer.get_vocab()
        if max(tokens) > max(known.values()):
            raise PromptError(
                f"{self.record.where} has the token {max(tokens)}, but the tokenizer's last is "
                f"{max(known.values())}; tokenise the text with the target's tokenizer"
            )
        return tokens


def _ended(tokens: list[int], ends: Collection[int | None], tokenizer: Any) -> list[int]:
    """The tokens up to the first of the ends that only ends and white space follow."""
    last = len(tokens)
    for index in reversed(range(len(tokens))):
        if tokens[index] in ends:
            last = index + 1
        elif tokenizer.decode([tokens[index]]).strip():
            break
    return tokens[:last]


class AnswerEnd:
    """The token that ends an answer of which only the text is known."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text = cast("int | None", tokenizer.eos_token_id)
        self._turn: int | None = None  # the first special token of the template behind an answer
        with suppress(PromptError):  # there is no template, or it is for other chats
            _, text = _probed_chat(tokenizer)
            _, end = _divided(text, _ANSWER, _ends_of(tokenizer, (), len(tokenizer)))
            self._turn = None if end is None else tokens_of(end, tokenizer)[-1]

    def behind(self, prompt: Sequence[int]) -> int | None:
        """The token that ends turns, if it ends one in the prompt; else the end of a text."""
        return self._turn if self._turn in prompt else self._text


class _Rendering(ChatRendering):
    """Answers, as the template renders them behind their prompts."""

    record: Record

    def answer(self, index: int, prompt: str, eos_token_ids: tuple[int, ...]) -> tuple[str, bool]:
        """The answer in message `index` behind its `prompt`: what the target would write.

        It is what the template renders behind the prompt, up to the first of `eos_token_ids` behind
        the message, else to the first special token there. Where the template leaves thoughts out
        of the message, or renders something else than the prompt in front of it, the answer is the
        message itself, behind what of its thoughts the prompt opens.

        Returns:
            The answer with the end of its turn, as far as the target writes it, and whether the
            template ends the turn.

        Raises:
            PromptError: the answer cannot follow its own prompt.
        """
        messages = self.record.messages[: index + 1]
        whole = self.text(messages, open_turn=False)
        follows = whole.startswith(prompt)
        rendered = whole[len(prompt) :] if follows else behind(prompt, whole)
        content = text_of(messages[-1]["content"]).strip()
        ends = _ends_of(self.tokenizer, eos_token_ids, len(self.tokenizer))
        body, end = _divided(rendered, content, ends)
        if "tool_calls" in messages[-1] and not follows:
            raise PromptError(
                f"{self.record.where} has an answer with tool_calls whose thoughts the chat "
                "template does not render behind its prompt; leave the answer out, with weight 0"
            )
        found = body.strip()
        if not follows or (found != content and content.endswith(found)):
            body = self._going_on(prompt, content)
        if self.record.open_ended and messages == self.record.messages:
            return body, True  # it was truncated
        return body + (end or ""), end is not None

    def _going_on(self, prompt: str, content: str) -> str:
        """The content behind the thoughts that the prompt opens, if it does."""
        tag = _OPENING.search(prompt)
        if tag is None:
            return content
        opened = tag[0].rstrip()
        if content.startswith(opened):
            return behind(tag[0], content)
        if f"{tag[1]}/{tag[2]}{tag[3]}" in content:
            return content
        raise PromptError(
            f"{self.record.where}: the prompt of the chat template ends with {opened!r}, and the "
            f"answer {content[:20]!r} does not go on from there; give it the thoughts, or set "
            "chat_template_kwargs such as enable_thinking"
        )


@functools.lru_cache(maxsize=4)
def _ends_of(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...], _size: int
) -> tuple[tuple[str, ...], ...]:
    """Texts of the tokens at which the target stops, and of all special tokens.

    `_size`: number of the tokenizer's tokens, which a user may add to.
    """
    stops = [str(tokenizer.decode([token])) for token in eos_token_ids if token < len(tokenizer)]
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return tuple(filter(str.strip, stops)), tuple(filter(str.strip, special))


def _divided(text: str, content: str, ends: tuple[tuple[str, ...], ...]) -> tuple[str, str | None]:
    """An answer and the end of its turn; None: the template does not end it.

    Special tokens that the content spells do not end it.
    """
    at = text.find(content) + len(content) if content in text else 0
    for texts in ends:
        found = [(text.find(s, at), s) for s in texts if s in text[at:]]
        if found:
            place, stop = min(found)
            return text[: at or place], text[at or place : place + len(stop)]
    return text.rstrip(), None


def thoughts_end(answer: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the thoughts in front of an answer; both texts have their special tokens.

    The last mark counts. Thoughts that a prompt opens may not end.
    """
    opened, closed = _thought_marks(tokenizer, str(tokenizer.chat_template))
    if closed in answer:
        return answer.rindex(closed) + len(closed)
    goes_on = prompt.rstrip().endswith(opened) or answer.lstrip().startswith(opened)
    return len(answer) if goes_on else 0


@functools.lru_cache(maxsize=4)
def _thought_marks(tokenizer: PreTrainedTokenizerBase, _template: str) -> tuple[str, str]:
    """What the template puts around thoughts or opens them with, and else <think> and </think>."""
    with contextlib.suppress(PromptError):
        prompt, whole = _probed_chat(tokenizer)
        before, _, after = whole.partition(_THOUGHT)
        if closed := after.partition(_ANSWER)[0].strip():
            return behind(prompt, before).strip() or before.split()[-1], closed
        tag = _OPENING.search(behind(before, prompt))
        if tag and tag[0] not in whole:
            return tag[0].strip(), f"{tag[1]}/{tag[2]}{tag[3]}"
    return "<think>", "</think>"


def _probed_chat(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt of a question, and the chat with its thoughts and answer; raises PromptError."""
    asked = {"role": "user", "content": "A question?"}
    told = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(REASONING, _THOUGHT)}
    chat = ChatRendering(Messages("a chat", (asked, told)), tokenizer)
    return chat.text((asked,), open_turn=True), chat.text((asked, told), open_turn=False)
