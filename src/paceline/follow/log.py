"""Reads logged requests: the new lines of files, redacted, and a uniform sample of their prompts.

Only prompts are read. The target answers the sampled ones again, because a draft learns from what
the target that is served now computes, and not from a text alone.
"""

from __future__ import annotations

import functools
import glob
import heapq
import json
import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from paceline.config import Options, StrictModel
from paceline.data.prompts import CorpusConfig, record_of
from paceline.errors import PromptError
from paceline.fingerprints import short_hash
from paceline.models.chat_text import HALF_PAIR
from paceline.rng import hashed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

CORPUS = CorpusConfig(path="log")
"""Of rows of a log."""
_PLACES = ("request.body", "request", "body", None)  # of a request in a row; None: the row itself
_TEXTS = ("messages", "prompt", "text")
_REDACTED = "[REDACTED]"
_TAIL = 1024  # bytes before a position, by which a file is known again


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression ({error}); correct it") from None
    return text


class LogConfig(StrictModel):
    """Logged requests, a JSON object per line.

    Attributes:
        path: A file, or a pattern such as `logs/*.jsonl`. A line has `messages`, `prompt` or
            `text`, or has them in `request`, `body` or `request.body`, as OpenAI-compatible access
            logs do. Files may grow, and be renamed or copied if the pattern has the new name, too;
            compressed ones are not read.
        slice: Key of a request's slice, such as `request.model`; the store keeps as many texts of
            each. Unset: all are of one.
        time: Key of its time, in seconds since 1970 or as ISO 8601; unset: when it is read.
        redact: Regular expressions; their matches in prompts are replaced before anything is
            written. Prompts of token ids are not read then.
    """

    path: Annotated[str, Options()] = Field(min_length=1)
    slice: str | None = None
    time: str | None = None
    redact: tuple[Annotated[str, AfterValidator(_pattern)], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _accept_a_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def files(self) -> list[Path]:
        """The files, those that were changed earlier first."""
        name = str(Path(self.path).expanduser())
        times: dict[Path, float] = {}
        for path in map(Path, glob.glob(name, recursive=True)):  # noqa: PTH207 - absolute
            with suppress(FileNotFoundError):  # it was renamed
                if path.is_file():
                    times[path] = path.stat().st_mtime
        return sorted(times, key=times.__getitem__)


class Logged(NamedTuple):
    """A prompt of the log.

    Attributes:
        digest: Of the prompt; equal prompts have the same.
        slice: Value of the slice's key.
        time: Seconds since 1970.
        row: The prompt, as a row of a corpus.
    """

    digest: str
    slice: str
    time: float
    row: dict[str, Any]


class Read(NamedTuple):
    """What was read of a log.

    Attributes:
        positions: Bytes that are read of each file, by a hash of the last of them.
        num_requests: Number of prompts.
        num_new: Number of different ones that may be chosen.
        num_faults: Number of lines without a prompt that can be read.
        fault: Place of the first of them.
        chosen: A uniform sample of the different prompts, in the order of the log.
    """

    positions: dict[str, int]
    num_requests: int
    num_new: int
    num_faults: int
    fault: str
    chosen: list[Logged]


def read(
    config: LogConfig,
    positions: Mapping[str, int],
    count: int,
    *,
    key: str,
    now: float,
    most: int | None = None,
    without: Collection[str] = (),
) -> Read:
    """Read new lines, and choose at most `count` prompts.

    Chosen are the prompts with the smallest hash of `key` and prompt: a uniform sample of the
    different prompts, whose texts alone are in memory.

    Args:
        config: The log.
        positions: Those of the last round.
        count: Size of the sample.
        key: Key of the hash; another key is another sample.
        now: Time of requests without one.
        most: Read at most this many different prompts; None: all.
        without: Digests of prompts that are not chosen.
    """
    ends, fault, num_faults, num_requests = dict[str, int](), "", 0, 0
    heap, known = list[tuple[int, int, Logged]](), set(without)
    for path in config.files():
        try:
            with path.open("rb") as stream:
                stream.seek(begin := _begin(stream, {**positions, **ends}))
                end = begin
                for line in stream:
                    enough = most is not None and len(known) - len(without) >= most
                    if enough or not line.endswith(b"\n"):  # it is being written
                        break
                    found: list[Logged] = []
                    try:
                        found += _prompts(config, line, now) if line.strip() else ()
                    except (PromptError, RecursionError, OverflowError):
                        num_faults += 1
                        fault = fault or f"{path} at byte {end}"
                    end += len(line)
                    num_requests += len(found)
                    for logged in found:
                        if logged.digest in known:
                            continue
                        known.add(logged.digest)
                        entry = -hashed(f"{key}\x1f{logged.digest}"), len(known), logged
                        (heapq.heappush if len(heap) < count else heapq.heappushpop)(heap, entry)
                if end:
                    ends[_mark(stream, end)] = end
        except OSError as error:
            raise PromptError(f"cannot read {path} ({error.strerror}); name a log") from None
    chosen = [logged for _, _, logged in sorted(heap, key=lambda entry: entry[1])]
    return Read(ends, num_requests, len(known) - len(without), num_faults, fault, chosen)


def _begin(stream: BinaryIO, positions: Mapping[str, int]) -> int:
    """How far a file is read: up to the last known position behind the bytes that were there.

    So a file is known under any name, and one that was emptied and has grown again is another.
    """
    size = os.fstat(stream.fileno()).st_size
    known = (end for mark, end in positions.items() if end <= size and _mark(stream, end) == mark)
    return max(known, default=0)


def _mark(stream: BinaryIO, end: int) -> str:
    """Hash of a position and the bytes before it."""
    stream.seek(max(0, end - _TAIL))
    return short_hash([str(end), stream.read(min(end, _TAIL))])


def _prompts(config: LogConfig, line: bytes, now: float) -> Iterator[Logged]:
    """The prompts of a line; a request for completions may have several.

    Raises:
        PromptError: it has none that can be read. Its message may have text of the line.
    """
    row = _parsed(line)
    places = (_at(row, place) for place in _PLACES)
    request = next((one for one in map(_parsed, places) if one.keys() & {*_TEXTS}), None)
    if request is None:
        raise PromptError("no messages, prompt or text")
    name = _at(row, config.slice) if config.slice else None
    name = "" if name is None else _redacted(str(name), config.redact)
    time = _seconds(_at(row, config.time), now) if config.time else now
    for prompt in _batch(request.get("prompt")):
        of_ids = isinstance(prompt, list) and not all(isinstance(part, dict) for part in prompt)
        if config.redact and of_ids:
            raise PromptError("a prompt of token ids cannot be redacted")
        own = request if prompt is None else request | {"prompt": prompt}
        kept = {key: own[key] for key in (*_TEXTS, "tools") if own.get(key) is not None}
        if switches := _switches(own.get("chat_template_kwargs")):
            kept["chat_template_kwargs"] = switches
        kept = _redacted(_unanswered(kept), config.redact)
        text = json.dumps(kept, sort_keys=True, ensure_ascii=False)
        if HALF_PAIR.search(text):
            raise PromptError("half of a UTF-16 pair")
        record_of(kept, "log", CORPUS)
        yield Logged(short_hash([text]), name, time, kept)


def _parsed(value: Any) -> dict[str, Any]:
    """An object, or the text of one; empty for anything else."""
    value = _json_of(value) if isinstance(value, str | bytes) else value
    return value if isinstance(value, dict) else {}


def _batch(prompt: Any) -> list[Any]:
    """Texts, or texts as tokens, of a batch; messages are one prompt, as is a list of tokens."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return prompt if several else [prompt or None]


def _switches(arguments: Any) -> dict[str, Any]:
    """Arguments of a template that are switches: a request may not bring a template of its own."""
    given = arguments if isinstance(arguments, dict) else {}
    return {name: value for name, value in given.items() if isinstance(value, bool)}


def _unanswered(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt as it was asked: without the answers at its end."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        return row
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return row | {"messages": messages}


def _redacted(value: Any, patterns: tuple[str, ...]) -> Any:
    """A value whose texts and numbers have no match, also in a text that is JSON as a whole.

    Names of keys are as they were, but in such a text.
    """
    match value:
        case str():
            text = _replaced(value, patterns)
            # without a quote around it, a match leaves no JSON
            inner = _json_of(text) or _json_of(value) if patterns else None
            if (clean := _redacted(inner, patterns)) == inner:
                return text
            written = _replaced(json.dumps(clean, ensure_ascii=False), patterns)
            # a match of the text as it was spelled may be there no more
            return written if written.count(_REDACTED) >= text.count(_REDACTED) else _REDACTED
        case int() | float() if not isinstance(value, bool):
            text = str(value)
            return value if _replaced(text, patterns) == text else _REDACTED
        case list():
            return [_redacted(one, patterns) for one in value]
        case dict():
            return {key: _redacted(one, patterns) for key, one in value.items()}
    return value


def _replaced(text: str, patterns: tuple[str, ...]) -> str:
    """A text without matches."""
    return functools.reduce(lambda text, one: re.sub(one, _REDACTED, text), patterns, text)


def _json_of(text: str | bytes) -> dict[str, Any] | list[Any] | None:
    """The object or list that a text is; None: it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict | list) else None


def _at(row: Any, dotted: str | None) -> Any:
    """The value of a nested key, None if there is none; without a key, the row itself."""
    for key in dotted.split(".") if dotted else ():
        row = _parsed(row).get(key)
    return row


def _seconds(value: Any, now: float) -> float:
    if isinstance(value, int | float):
        return float(value)
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else now
    except ValueError:
        return now
