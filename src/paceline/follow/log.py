"""Reads logged requests: the new lines of files, redacted, and a uniform sample of their prompts.

Only prompts are read. The target answers the sampled ones again, because a draft learns from what
the target that is served now computes, and not from a text alone.
"""

from __future__ import annotations

import functools
import glob
import heapq
import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from paceline.config import Options, StrictModel
from paceline.data.prompts import CorpusConfig, record_of
from paceline.errors import PromptError
from paceline.fingerprints import short_hash
from paceline.rng import hashed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_PLACES = ((), ("request",), ("body",), ("request", "body"))  # of a request in a row
_KEPT = ("messages", "prompt", "text", "tools", "chat_template_kwargs")
_REDACTED = "[REDACTED]"
CORPUS = CorpusConfig(path="log")
"""Of rows of a log."""


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
            logs do. Files may grow and be renamed, if the pattern has the new name, too.
        slice: Key of a request's slice, such as `request.model`; the store keeps as many texts of
            each. Unset: all are of one.
        time: Key of its time, in seconds since 1970 or as ISO 8601; unset: when it is read.
        redact: Regular expressions; their matches in prompts are replaced before anything is
            written.
    """

    kind: Literal["json_lines"] = "json_lines"
    path: Annotated[str, Options()] = Field(min_length=1)
    slice: str | None = None
    time: str | None = None
    redact: tuple[Annotated[str, AfterValidator(_pattern)], ...] = ()

    def files(self) -> list[Path]:
        """The files, those that were changed earlier first."""
        found = map(Path, glob.glob(str(Path(self.path).expanduser())))  # noqa: PTH207 - absolute
        return sorted((one for one in found if one.is_file()), key=lambda one: one.stat().st_mtime)


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
        positions: Bytes that are read, by the identity of a file.
        num_requests: Number of prompts.
        faults: What is wrong with lines without a prompt.
        chosen: A uniform sample of the different prompts, in the order of the log.
    """

    positions: dict[str, int]
    num_requests: int
    faults: list[str]
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
    different prompts, in memory of the size of the sample.

    Args:
        config: The log.
        positions: Those of the last round.
        count: Size of the sample.
        key: Key of the hash; another key is another sample.
        now: Time of requests without one.
        most: Read at most this many prompts; None: all.
        without: Digests of prompts that are not chosen.
    """
    ends, faults, num_requests = dict(positions), list[str](), 0
    heap, known = list[tuple[int, int, Logged]](), set(without)
    for line, where, file, end in _lines(config, positions):
        found: list[Logged] = []
        try:
            found += _prompts(config, line, where, now)
        except PromptError as error:
            faults.append(str(error))
        for logged in found:
            num_requests += 1
            if logged.digest in known:
                continue
            known.add(logged.digest)
            entry = -hashed(f"{key}\x1f{logged.digest}"), num_requests, logged
            (heapq.heappush if len(heap) < count else heapq.heappushpop)(heap, entry)
        ends[file] = end
        if most is not None and num_requests >= most:
            break
    chosen = [logged for _, _, logged in sorted(heap, key=lambda entry: entry[1])]
    return Read(ends, num_requests, faults, chosen)


def _lines(
    config: LogConfig, positions: Mapping[str, int]
) -> Iterator[tuple[bytes, str, str, int]]:
    """Whole new lines, their places, files and ends; a file that became shorter is read again."""
    for path in config.files():
        try:
            with path.open("rb") as stream:
                status = path.stat()
                file = f"{status.st_dev}-{status.st_ino}"
                begin = positions.get(file, 0)
                end = begin if begin <= status.st_size else 0
                stream.seek(end)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    where, end = f"{path} at byte {end}", end + len(line)
                    if line.strip():
                        yield line, where, file, end
        except OSError as error:
            raise PromptError(f"cannot read {path} ({error.strerror}); name a log") from None


def _prompts(config: LogConfig, line: bytes, where: str, now: float) -> Iterator[Logged]:
    """The prompts of a line; a request for completions may have several."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise PromptError(f"{where} is not a JSON object")
    request = next((one for keys in _PLACES if (one := _request(row, keys)) is not None), None)
    if request is None:
        raise PromptError(f"{where} has no messages, prompt or text; name other files in log.path")
    name, time = _at(row, config.slice), _seconds(_at(row, config.time), now)
    for prompt in _batch(request.get("prompt")):
        own = request if prompt is None else request | {"prompt": prompt}
        kept = {key: own[key] for key in _KEPT if own.get(key) is not None}
        kept = _redacted(_unanswered(kept), config.redact)
        record_of(kept, where, CORPUS)
        digest = short_hash([json.dumps(kept, sort_keys=True)])
        yield Logged(digest, "" if name is None else str(name), time, kept)


def _request(row: Any, keys: tuple[str, ...]) -> dict[str, Any] | None:
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    wanted = isinstance(row, dict) and not row.keys().isdisjoint(("messages", "prompt", "text"))
    return row if wanted else None


def _batch(prompt: Any) -> list[Any]:
    """Texts, or texts as tokens, of a batch; messages are one prompt, as is a list of tokens."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return prompt if several else [prompt]


def _unanswered(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt as it was asked: without the answers at its end."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        return row
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return row | {"messages": messages}


def _redacted(value: Any, patterns: tuple[str, ...]) -> Any:
    """A value whose texts have no match; keys, such as role, and their names are as they were."""
    match value:
        case str():
            return functools.reduce(lambda text, one: re.sub(one, _REDACTED, text), patterns, value)
        case list():
            return [_redacted(one, patterns) for one in value]
        case dict():
            return {k: v if k == "role" else _redacted(v, patterns) for k, v in value.items()}
    return value


def _at(row: Any, dotted: str | None) -> Any:
    for key in dotted.split(".") if dotted else ():
        row = row.get(key) if isinstance(row, dict) else None
    return row if dotted else None


def _seconds(value: Any, now: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else now
    except ValueError:
        return now
