"""Chats: checks of their messages, and the prompt that a tokenizer's template makes of them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Mapping
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transformers.utils.chat_template_utils import render_jinja_template

from paceline.environment import began
from paceline.errors import EmptyTextError, PromptError, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})  # keys of thoughts
HALF_PAIR = re.compile("[\ud800-\udfff]")  # of UTF-16, which no other encoding holds

_TEXT_PARTS = ("text", "input_text", "output_text")
_PROBES = ("first", "second")
_lock = threading.Lock()


class Chat(Protocol):
    """The messages of a chat, with what its template gets, and where it is for error messages."""

    @property
    def where(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]: ...

    @property
    def template_kwargs(self) -> Mapping[str, Any]: ...


class Messages(NamedTuple):
    """A chat of messages alone."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = {}


def chat_prompt(record: Chat, tokenizer: PreTrainedTokenizerBase, end: int | None = None) -> str:
    """The prompt that an engine makes of the first `end` messages, to the start of an answer."""
    return ChatRendering(record, tokenizer).text(record.messages[:end], open_turn=True)


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the text of the template has a name."""
    names = REASONING if name in REASONING else {name}
    return any(each in str(tokenizer.chat_template) for each in names)


@contextlib.contextmanager
def steady(arguments: dict[str, Any]) -> Iterator[None]:
    """A template reads the time of the run's start, or that in `strftime_now` of its arguments."""
    given = arguments.pop("strftime_now", None)
    now = datetime.fromisoformat(str(given)) if given else began.get() or datetime.now()
    read_by_template = render_jinja_template.__globals__
    with _lock:
        clock = read_by_template["datetime"]
        read_by_template["datetime"] = SimpleNamespace(now=lambda: now)
        try:
            yield
        finally:
            read_by_template["datetime"] = clock


class ChatRendering:
    """The template of a tokenizer with the tools and arguments of a record."""

    def __init__(self, record: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise PromptError(
                f"{record.where} is a chat, but the tokenizer has no chat template; copy the "
                "model's chat_template.jinja beside it, or use plain prompts"
            )
        if any("tool_calls" in m for m in record.messages) and not reads(tokenizer, "tool_calls"):
            raise PromptError(
                f"{record.where} has tool_calls, which the chat template does not render; remove "
                "them, or use a template that does"
            )
        self.record = record
        self.tokenizer = tokenizer
        self.tools: Any = list(record.tools) or None

    def text(self, messages: Sequence[Message], *, open_turn: bool) -> str:
        readable: Any = self._readable(messages)
        arguments = dict(self.record.template_kwargs)
        with self._misfits(), steady(arguments):
            text: Any = self.tokenizer.apply_chat_template(
                readable,
                tools=self.tools,
                add_generation_prompt=open_turn,
                tokenize=False,
                **arguments,
            )
        return text

    @contextlib.contextmanager
    def _misfits(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a template is a program and can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(
                f"{self.record.where} does not fit the chat template: {reason}"
            ) from None

    def _readable(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with their content in a form that the template reads.

        Parts of text are joined by line breaks for templates that read strings only; strings become
        a part for those that read parts only, which would render nothing of them.
        """
        tokenizer, template = self.tokenizer, str(self.tokenizer.chat_template)
        plain = all(isinstance(m["content"], str) for m in messages)
        strings = _renders(tokenizer, template, in_parts=False)
        if plain and strings:
            return list(messages)
        if _renders(tokenizer, template, in_parts=True):
            change = _as_it_is if strings else _as_parts
        else:
            change = _as_it_is if plain else text_of
        return [message | {"content": change(message["content"])} for message in messages]


@functools.lru_cache(maxsize=4)
def _renders(tokenizer: PreTrainedTokenizerBase, _template: str, *, in_parts: bool) -> bool:
    """Whether the template renders content that is a string, or a list of parts."""
    parts = [{"type": "text", "text": text} for text in _PROBES]
    messages: Any = [{"role": "user", "content": parts if in_parts else " ".join(_PROBES)}]
    try:
        with steady({}):
            found: Any = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # as above
        return False
    return all(probe in found for probe in _PROBES) and "'text'" not in found


def _as_it_is(content: Any) -> Any:
    return content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if content and isinstance(content, str) else content


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def messages_of(value: Any, where: str) -> tuple[Message, ...]:
    """Check the messages of a chat.

    Keys without a value are left out. Content is a string, or a list of text parts. A message that
    calls tools may have none: it is then empty, as vLLM passes it to templates. Arguments of calls
    that are JSON text are parsed, as vLLM does.
    """
    if not isinstance(value, list) or not value:
        kind = PromptError if value else EmptyTextError
        raise kind(f"{where} has no list of messages; wanted objects with role and content")
    found = tuple(_message(message, where) for message in value)
    if len(found) == 1 and found[0]["role"] == "assistant":
        raise PromptError(f"{where} has nothing but an answer; add the message that it answers")
    return found


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise PromptError(
            f"{where} has the message {shorten(str(value))}; wanted role and content as strings"
        )
    message = {key: item for key, item in value.items() if item is not None}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _tool_calls(calls, where)
    message["content"] = _message_content(message, where)
    # further keys may hold dates, which are no JSON
    text = json.dumps(message, ensure_ascii=False, default=str)
    if HALF_PAIR.search(text):
        raise PromptError(f"{where} has half of a UTF-16 pair in a message; repair the text")
    return json.loads(text)


def _message_content(message: Message, where: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, list):
        content = [_text_part(part, where) for part in content]
    if content is not None and not isinstance(content, str | list):
        raise PromptError(
            f"{where} has a message whose content is a {type(content).__name__}; wanted a string, "
            "a list of text parts, or null beside tool_calls"
        )
    if text_of(content).strip() or message.keys() & (REASONING | {"tool_calls"}):
        return content or ""
    if message["role"] == "assistant":
        raise EmptyTextError(f"{where} has an empty answer; fill it or leave the line out")
    if not isinstance(content, str):
        raise EmptyTextError(f"{where} has a message without text; wanted role and content")
    return content


def _text_part(part: Any, where: str) -> dict[str, str]:
    match part:
        case str():
            return {"type": "text", "text": part}
        case {"type": kind, "text": str(text)} if kind in _TEXT_PARTS:
            return {"type": "text", "text": text}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(
        f"{where} has a message with a part of the type {shorten(str(kind))}; only text can be read"
    )


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = _parsed(value, "tool_calls", where)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise PromptError(f"{where} has tool_calls of another form; wanted a list of objects")
    found: list[dict[str, Any]] = []
    for call in calls:
        inner = call.get("function")
        function = dict(inner if isinstance(inner, Mapping) else call)
        arguments = function.get("arguments") or {}
        function["arguments"] = _parsed(arguments, "arguments of tool_calls", where)
        found.append({**call, "function": function} if isinstance(inner, Mapping) else function)
    return found


def tools_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Check the tools of a chat: a list of objects, or JSON text of such; None: no tools."""
    tools = _parsed(value, "tools", where)
    if isinstance(tools, list):
        tools = [_parsed(tool, "tools", where) for tool in tools]
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise PromptError(
            f"{where} has {shorten(str(value))} as tools; wanted a list of objects, or JSON text"
        )
    return tuple(tools or ())


def template_kwargs_of(value: Any, where: str) -> dict[str, Any]:
    """Check the arguments of a chat's template: an object, or JSON text; None: no arguments."""
    found = {} if value is None else _parsed(value, "chat_template_kwargs", where)
    if not isinstance(found, dict):
        raise PromptError(
            f"{where} has {shorten(str(value))} as chat_template_kwargs; wanted an object such as "
            '{"enable_thinking": false}'
        )
    return found


def _parsed(value: Any, name: str, where: str) -> Any:
    """The value of JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} has {name} that are not JSON: {shorten(value)}") from None
