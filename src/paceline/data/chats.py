"""The answers of chats, as the tokenizer's template renders them behind their prompts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import PromptError
from paceline.models.answer_text import behind
from paceline.models.chat_text import REASONING, ChatRendering, Messages, reads, steady, text_of
from paceline.models.prompt_text import tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import Record
    from paceline.models.chat_text import Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENING = re.compile(r"([<\[(◁])([^\s<>\[\]()◁▷/]+)([>\])▷])\s*$")
_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷]+[>\]▷]")
_THOUGHT, _ANSWER = "A thought.", "An answer."  # of a chat that tells what a template renders
_PROBE = 16  # characters of a rendered answer that are looked up in the message


class Answer(NamedTuple):
    """What an assistant wrote for a prompt, as its template renders it.

    Attributes:
        text: The answer and the end of the turn, as far as the target writes it.
        given: Text in front of it that the template leaves out of its `{% generation %}`.
        ended: False if the template does not end the turn.
    """

    text: str
    given: str
    ended: bool


def chat_answer(
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    prompt: str,
    eos_token_ids: Sequence[int],
) -> Answer:
    """The answer in message `index` behind its `prompt`: what the target would write.

    It goes on where the prompt ends. A template whose prompts open the thoughts may leave them out
    of messages, or open them again: the answer is then the message behind what the prompt opens.
    The answer ends with the first of `eos_token_ids` that the template puts behind it, else with
    the first special token there. What follows is of no turn, such as a line break. With
    `{% generation %}` in the template, the answer is what it encloses.

    Raises:
        PromptError: the template's answer cannot follow its own prompt.
    """
    return _Rendering(record, tokenizer).answer(index, prompt, tuple(eos_token_ids))


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
        prompt, whole = _probed(tokenizer)
        before, _, after = whole.partition(_THOUGHT)
        if closed := after.partition(_ANSWER)[0].strip():
            return behind(prompt, before).strip() or before.split()[-1], closed
        tag = _OPENING.search(behind(before, prompt))
        if tag and tag[0] not in whole:
            return tag[0].strip(), f"{tag[1]}/{tag[2]}{tag[3]}"
    return "<think>", "</think>"


def _probed(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt of a question, and the chat with its thoughts and answer; raises PromptError."""
    asked = {"role": "user", "content": "A question?"}
    told = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(REASONING, _THOUGHT)}
    chat = ChatRendering(Messages("a chat", (asked, told)), tokenizer)
    return chat.text((asked,), open_turn=True), chat.text((asked, told), open_turn=False)


class AnswerEnd:
    """The token that ends an answer of which only the text is known."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text = cast("int | None", tokenizer.eos_token_id)
        self._turn = _end_of_turn(tokenizer)

    def behind(self, prompt: Sequence[int]) -> int | None:
        """The token that ends turns, if it ends one in the prompt; else the end of a text."""
        return self._turn if self._turn in prompt else self._text


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the template puts behind an answer."""
    try:
        _, text = _probed(tokenizer)
    except PromptError:  # there is no template, or it is for other chats
        return None
    _, end = _divided(text, _ANSWER, _ends_of(tokenizer, (), len(tokenizer)))
    return None if end is None else tokens_of(end, tokenizer)[-1]


def warn_of_unused(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn once of what chats give to the template that it does not read."""
    counts: Counter[str] = Counter()
    for record in (each for each in records if each.kind == "chat"):
        thoughts = {"reasoning_content" for m in record.messages if m.keys() & REASONING}
        counts.update([*record.template_kwargs, *thoughts, *(["tools"] if record.tools else [])])
    own = ("chat_template", "documents")
    unused = [name for name in counts if name not in own and not reads(tokenizer, name)]
    if unused:
        texts = ", ".join(f"{name} ({counts[name]} chats)" for name in unused)
        warnings.warn(
            f"the chat template does not read {texts}; prompts are the same without", stacklevel=3
        )


class _Rendering(ChatRendering):
    """Answers, as the template renders them behind their prompts."""

    record: Record

    def closed(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of whole turns, and the places in it that `{% generation %}` encloses."""
        with self._misfits():
            arguments = dict(self.record.template_kwargs)
            template = self.tokenizer.get_chat_template(
                arguments.pop("chat_template", None), self.tools
            )
        if not _GENERATION.search(template):
            return self.text(messages, open_turn=False), []
        readable: Any = self._readable(messages)
        with self._misfits(), steady(arguments, is_prompt=False):
            rendered: Any = render_jinja_template(
                [readable],
                tools=self.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **arguments},
            )
        texts, spans = rendered
        return texts[0], spans[0]

    def answer(self, index: int, prompt: str, eos_token_ids: tuple[int, ...]) -> Answer:
        messages = self.record.messages[: index + 1]
        whole, spans = self.closed(messages)
        content = text_of(messages[-1]["content"]).strip()
        ends = _ends_of(self.tokenizer, eos_token_ids, len(self.tokenizer))
        rendered, given = _behind(prompt, whole, spans)
        opened = ""
        if rendered is None:
            before = self.text(messages[:-1], open_turn=False)
            opened = prompt[len(before) :] if prompt.startswith(before) else ""
            if opened.strip() and whole.count(opened) > before.count(opened):
                # The template renders earlier turns differently once an answer follows.
                rendered = whole[whole.rindex(opened) + len(opened) :]
        body, end = _divided(whole if rendered is None else rendered, content, ends)
        if "tool_calls" in messages[-1] and (rendered is None or _lacks(body, content)):
            raise PromptError(
                f"{self.record.where} has an answer with tool_calls whose thoughts the chat "
                "template does not render behind its prompt; leave the answer out, with weight 0"
            )
        if rendered is None:
            body = self._going_on(opened, whole, body, content)
        else:
            left_out = _left_out(body, content)
            if left_out and not prompt.rstrip().endswith(left_out.rstrip()):
                body, given = left_out + body.lstrip(), ""
        if self.record.open_ended and messages == self.record.messages:
            return Answer(body, given, ended=True)  # it was truncated
        return Answer(body + (end or ""), given, end is not None)

    def _going_on(self, opened: str, whole: str, body: str, content: str) -> str:
        """The content behind what the prompt opens, where the template renders something else."""
        if not opened.strip():
            return content
        start, space = opened.rstrip(), opened[len(opened.rstrip()) :]
        for size in range(min(len(start), len(content)), 0, -1):
            if start.endswith(content[:size]) and start[:-size] in whole:
                rest = content[size:]
                pairs = zip(rest, space, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                return rest[sum(1 for _ in same) :]
        tag = _OPENING.search(start)
        closes = tag is not None and f"{tag[1]}/{tag[2]}{tag[3]}" in content
        if closes or (content not in whole and _left_out(body[-len(content) :], content)):
            return content
        raise PromptError(
            f"{self.record.where}: the prompt of the chat template ends with {start[-20:]!r}, and "
            f"the answer {content[:20]!r} does not go on from there; give it the thoughts, or "
            "set chat_template_kwargs such as enable_thinking"
        )


def _behind(prompt: str, whole: str, spans: Sequence[tuple[int, int]]) -> tuple[str | None, str]:
    """What the template renders behind a prompt, without the given part, and that part."""
    if whole.startswith(prompt):
        start = next((begin for begin, end in spans if end > len(prompt)), 0)
        start = max(start, len(prompt))
        return whole[start:], whole[len(prompt) : start]
    return (whole[spans[-1][0] :], "") if spans else (None, "")


class _Ends(NamedTuple):
    """Texts of the tokens at which the target stops, and of all special tokens."""

    stops: tuple[str, ...]
    special: tuple[str, ...]


@functools.lru_cache(maxsize=4)
def _ends_of(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...], _size: int
) -> _Ends:
    """`_size`: number of the tokenizer's tokens, which a user may add to."""
    stops = [str(tokenizer.decode([token])) for token in eos_token_ids if token < len(tokenizer)]
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return _Ends(tuple(filter(str.strip, stops)), tuple(filter(str.strip, special)))


def _divided(text: str, content: str, ends: _Ends) -> tuple[str, str | None]:
    """An answer and the end of its turn; None: the template does not end it.

    Special tokens that the content spells do not end it.
    """
    at = text.find(content) + len(content) if content and content in text else 0
    close = len(text)
    while close > at:
        kept = text[at:close].rstrip()
        size = next((len(s) for s in (*ends.stops, *ends.special) if kept.endswith(s)), 0)
        close = at + len(kept) - size
        if not size:
            break
    # text can follow the end of the turn
    for start, texts in ((close, ends.stops), (at or close, ends.stops), (close, ends.special)):
        found = [(text.find(s, start), s) for s in texts if s in text[start:]]
        if found:
            place, stop = min(found)
            return text[:start], text[start : place + len(stop)]
    return text[:close], None


def _lacks(body: str, content: str) -> bool:
    """Whether a text between the tags of the content is not in the body."""
    return any(text.strip() not in body for text in _TAG.split(content))


def _left_out(body: str, content: str) -> str:
    """The start of the content, such as thoughts, that the body lacks."""
    found = body.lstrip()
    if content in body:
        return ""
    if not found:
        return content
    place = content.find(found[:_PROBE])
    while place >= 0:
        if found.startswith(content[place:]):
            return content[:place]
        place = content.find(found[:_PROBE], place + 1)
    return ""
