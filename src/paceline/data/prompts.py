"""Reads prompts, prompt-completion pairs, documents and chats from files and hub data sets.

Sources: `.txt` (one text per line), `.jsonl`, `.parquet`, a directory of these, a pattern such as
`runs/*/data`, or a hub data set.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.config import StrictModel
from paceline.data.text_files import (
    WANTED,
    data_files,
    folder_files,
    is_pattern,
    kind_of,
    matches,
    read_data_set,
    read_file,
    warn_of_splits,
)
from paceline.errors import EmptyTextError, PromptError
from paceline.fingerprints import files_fingerprint
from paceline.models.chat_text import HALF_PAIR, Message, messages_of, template_kwargs_of, tools_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Text = str | list[int]

_LARGEST_LOG_PROB = 1e-3  # above 0 by rounding
_ROLES = {name: name for name in ("user", "assistant", "system", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
_TRUNCATED = frozenset({"length", "context"})  # stop reasons written by generate-data


class CorpusConfig(StrictModel):
    """Location of a corpus; a plain string sets `path` only.

    Attributes:
        path: A `.txt`, `.jsonl` or `.parquet` file, a directory of such files, a pattern of these
            such as `runs/*/data`, or a hub data set.
        split: Split of a hub data set; unset: `train`. A directory has the rows of all its files;
            with a split, those that the datasets library finds by the file names.
        subset: Subset of a hub data set, such as `main` of `gsm8k`, or a directory in a directory;
            a README.md in a directory is not read.
        prompt_field: Column with the prompt, if not `prompt`; `a.b` names a nested column.
        completion_field: Column with the completion; used only together with `prompt_field`.
        tools: Tools for the template of every chat whose row has no column `tools`. A text that is
            asked as a chat, as by `format: chat`, gets them too.
        chat_template_kwargs: Arguments for the template, such as `{enable_thinking: false}`, as
            for `tools`; those of a chat's column `chat_template_kwargs` take precedence. A date as
            `strftime_now` is what the template writes for today.
        limit: Read only the first N texts.
    """

    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(min_length=1)
    split: str | None = None
    subset: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _accept_a_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _completion_needs_prompt(self) -> CorpusConfig:
        if self.completion_field is not None and self.prompt_field is None:
            raise ValueError("completion_field needs prompt_field; set both")
        return self

    def first(self, count: int) -> Self:
        """The first `count` texts of the corpus."""
        return self.model_copy(update={"limit": min(self.limit or count, count)})


class TopTokens(NamedTuple):
    """A model's most likely tokens before each token of a completion.

    Attributes:
        tokens: Ids at each position; empty where they were not recorded.
        log_probs: Their log-probabilities in nats.
    """

    tokens: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Record:
    """One text of a corpus.

    A document has `text`, a prompt has `text` and optionally `completion`, a chat has `messages`.

    Attributes:
        tools: Tools for the template of a chat, or of the chat that a text may become.
        template_kwargs: Further arguments of the template.
        where: File and line, or data set and row, for error messages.
        id: The row's own id, if it has one.
        open_ended: Append no end-of-text token: the text is truncated or already has one.
        top: The most likely tokens of the model that wrote the completion; None: not recorded.
        hidden: Its hidden states before each token, bfloat16 bytes; None: not recorded.
    """

    where: str
    kind: Literal["document", "prompt", "chat"]
    text: Text = ""
    completion: Text | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    id: str | None = None
    open_ended: bool = False
    top: TopTokens | None = None
    hidden: bytes | None = None

    @property
    def asked(self) -> str:
        """The text or messages without the answer; equal for all answers to a prompt."""
        messages = self.messages
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return json.dumps([self.text, messages])

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are answers of a chat's assistant.

        A first message answers nothing. One with `weight` 0, as in OpenAI's format, is context.
        """
        return [
            index
            for index, message in enumerate(self.messages)
            if index and message["role"] == "assistant" and message.get("weight") != 0
        ]


def read_records(corpus: CorpusConfig | str | Path, *, skip_empty: bool = False) -> list[Record]:
    """Read every text of a corpus.

    `skip_empty`: leave out rows without text, for training; a warning counts them.

    Raises:
        PromptError: the corpus is missing, empty or has a malformed line (the message names it).
    """
    return list(_records(corpus, skip_empty=skip_empty))


def stream_records(corpus: CorpusConfig | str | Path) -> Iterator[Record]:
    """Read training text one by one, for data sets that do not fit into memory; skips empty rows.

    The split of a data set must be a plain name, without a slice.

    Raises:
        PromptError: as `read_records`, once the faulty line is reached.
    """
    return _records(corpus, streaming=True, skip_empty=True)


def count_records(corpus: CorpusConfig, **reading: bool) -> int:
    """The number of its texts, which are not kept; `reading`: `streaming` and `skip_empty`."""
    return sum(1 for _ in _records(corpus, **reading))


def read_columns(
    corpus: CorpusConfig, names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Read the named columns of every row, for tasks; `a.b` names a nested column.

    Yields:
        The values by name, and the row's location. A line of a `.txt` file has one column, `text`.

    Raises:
        PromptError: as `read_records`, a row lacks a column, or a text is empty.
    """
    empty = True
    for row, where in itertools.islice(_rows(corpus, streaming=False), corpus.limit):
        empty = False
        values = {name: _column(row, name, where) for name in names}
        for name, value in values.items():
            if isinstance(value, str):
                _text(value, name, where)
        yield values, where
    if empty:
        raise PromptError(f"{corpus.path} holds no text; add at least one text")


def _rows(corpus: CorpusConfig, *, streaming: bool) -> Iterator[tuple[Mapping[str, Any], str]]:
    path = Path(corpus.path)
    if is_pattern(path):
        parts = (_rows(part, streaming=streaming) for part in _matching(corpus))
        return itertools.chain.from_iterable(parts)
    suffix = kind_of(path)
    if path.is_file() or suffix in (".txt", ".jsonl"):
        if suffix == ".parquet" and corpus.split not in (None, "train"):
            raise PromptError(
                f"{path} is one file, which has no split {corpus.split}; unset split, or set limit"
            )
        return read_file(path)
    local = suffix == ".parquet" or path.is_absolute() or corpus.path.startswith((".", "~"))
    if not path.exists() and local:
        raise PromptError(f"no file or directory at {path}; check the path")
    files = folder_files(path) if path.is_dir() else []
    whole = corpus.split is None and corpus.subset is None
    if files and (whole or kind_of(files[0]) == ".txt"):
        warn_of_splits(path, files)
        return itertools.chain.from_iterable(map(read_file, files))
    split = corpus.split or "train"
    return read_data_set(corpus.path, corpus.subset, split, streaming=streaming)


def corpus_fingerprint(corpus: CorpusConfig) -> str:
    """Hash of the local files of a corpus; empty if there are none or they cannot be read."""
    path = Path(corpus.path)
    try:
        files = data_files(path)
        return files_fingerprint(files) if files else ""
    except OSError:
        return ""


def _records(
    corpus: CorpusConfig | str | Path, *, streaming: bool = False, skip_empty: bool = False
) -> Iterator[Record]:
    corpus = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=str(corpus))
    count, skipped, first = 0, 0, ""
    for row, where in _rows(corpus, streaming=streaming):
        try:
            record = _record(row, where, corpus)
        except EmptyTextError:
            if not skip_empty:
                raise
            skipped, first = skipped + 1, first or where
            continue
        yield record
        count += 1
        if count == corpus.limit:
            break
    if skipped:
        text = f"rows without text are left out: {skipped:,}, the first is {first}"
        warnings.warn(f"{corpus.path}: {text}", stacklevel=2)
    if not count:
        raise PromptError(f"{corpus.path} holds no text; add at least one text")


def _matching(corpus: CorpusConfig) -> Iterator[CorpusConfig]:
    """The corpora that match the pattern of one."""
    found = matches(Path(corpus.path))
    if not found:
        raise PromptError(f"no file or directory matches {corpus.path}; check the pattern")
    for path in found:
        yield corpus.model_copy(update={"path": str(path), "limit": None})


def _record(row: Mapping[str, Any], where: str, corpus: CorpusConfig) -> Record:
    record = _content(row, where, corpus)
    name, stop_reason = row.get("id"), row.get("stop_reason")
    recorded = stop_reason, record.top, record.hidden
    exact_tokens = isinstance(record.completion, list) and any(x is not None for x in recorded)
    # a text may become a chat
    settings = {} if record.kind == "chat" else template_settings(corpus, where)
    return dataclasses.replace(
        record,
        **settings,
        id=str(name) if isinstance(name, str | int) else None,
        open_ended=exact_tokens or stop_reason in _TRUNCATED,
    )


def _content(row: Mapping[str, Any], where: str, corpus: CorpusConfig) -> Record:
    """Parse one row by the configured columns or, without these, by its keys."""
    if corpus.prompt_field is not None:
        return _in_columns(row, where, corpus.prompt_field, corpus.completion_field)
    match row:
        case {"messages": messages} | {"conversations": [] as messages}:
            return _chat(row, messages, where, corpus)
        case {"conversations": [{**first}, *_] as said} if first:
            return _chat(row, _shared(row, list(said), where), where, corpus)
        case {"prompt_tokens": [*prompt], "completion_tokens": [*completion]}:
            # Written by `generate-data`; tokenising the texts again could give other tokens.
            prompt = _text(prompt, "prompt_tokens", where)
            found = Record(where, "prompt", prompt, _text(completion, "completion_tokens", where))
            top, hidden = _top_tokens(row, len(completion), where), row.get("hidden_states")
            return dataclasses.replace(found, top=top, hidden=hidden)
        case {"prompt": [{**first}, *_] as asked} if first:
            return _chat(row, _asked_and_answered(row, list(asked)), where, corpus)
        case {"prompt": prompt}:
            prompt, completion = _text(prompt, "prompt", where), row.get("completion")
            if completion is not None:
                completion = _text(completion, "completion", where)
            return Record(where, "prompt", prompt, completion)
        case {"text": text}:
            return Record(where, "document", text=_text(text, "text", where))
        case {"tokens": tokens} if not isinstance(tokens, str):
            return Record(where, "document", text=_text(tokens, "tokens", where))
    keys = ", ".join(map(str, row)) or "none"
    kind = PromptError if any(row.values()) else EmptyTextError
    raise kind(f"{where} has the keys {keys}; {WANTED}, or name the column in prompt_field")


def _in_columns(
    row: Mapping[str, Any], where: str, prompt_field: str, completion_field: str | None
) -> Record:
    completion = None
    if completion_field is not None:
        completion = _text(_column(row, completion_field, where), "completion", where)
    prompt = _text(_column(row, prompt_field, where), prompt_field, where)
    return Record(where, "prompt", text=prompt, completion=completion)


def _chat(row: Mapping[str, Any], messages: Any, where: str, corpus: CorpusConfig) -> Record:
    tools = corpus.tools if row.get("tools") is None else row["tools"]
    arguments = template_kwargs_of(row.get("chat_template_kwargs"), where)
    return Record(
        where,
        "chat",
        messages=messages_of(messages, where),
        tools=tools_of(tools, where),
        template_kwargs=(corpus.chat_template_kwargs or {}) | arguments,
    )


def template_settings(corpus: CorpusConfig | None, where: str) -> dict[str, Any]:
    """The fields of a record that the template of a chat gets from its corpus."""
    if corpus is None:
        return {}
    arguments = corpus.chat_template_kwargs or {}
    return {"tools": tools_of(corpus.tools, where), "template_kwargs": arguments}


def _shared(row: Mapping[str, Any], said: list[Any], where: str) -> list[Any]:
    """Messages of a row as ShareGPT has them: `from` and `value`, and perhaps a column `system`."""
    found: list[Any] = []
    for message in said:
        if isinstance(message, dict) and "from" in message:
            rest = {name: value for name, value in message.items() if name not in ("from", "value")}
            sender, content = message["from"], message.get("value")
            if sender not in _ROLES:
                raise PromptError(
                    f"{where} has a message from {sender!r}; wanted one of {', '.join(_ROLES)}, or "
                    "write the row as messages, with role and content"
                )
            message = rest | {"role": _ROLES[sender], "content": content}
        found.append(message)
    system = row.get("system")
    return [{"role": "system", "content": system}, *found] if system else found


def _asked_and_answered(row: Mapping[str, Any], asked: list[Any]) -> list[Any]:
    """Messages of a row with the prompt and the completion as messages; the prompt is context."""
    context = [m | {"weight": 0} if isinstance(m, dict) else m for m in asked]
    answer = row.get("completion")
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return [*context, *answer] if isinstance(answer, list) else context


def _top_tokens(row: Mapping[str, Any], count: int, where: str) -> TopTokens | None:
    """The columns `top_tokens` and `top_log_probs`, with `count` positions."""
    tokens, log_probs = row.get("top_tokens"), row.get("top_log_probs")
    if tokens is None and log_probs is None:
        return None
    tokens, log_probs = tokens or [], log_probs or []
    sizes = [list(map(len, rows)) for rows in (tokens, log_probs)]
    if len(tokens) != count or sizes[0] != sizes[1]:
        raise PromptError(
            f"{where} has {count} completion tokens, and top_tokens and top_log_probs of "
            f"{len(tokens)} and {len(log_probs)} positions or of unequal lengths; record them again"
        )
    if not all(value <= _LARGEST_LOG_PROB for values in log_probs for value in values):
        raise PromptError(
            f"{where} has a log probability in top_log_probs that is NaN or above 0; record it "
            "again"
        )
    return TopTokens(tokens, log_probs)


def _column(row: Mapping[str, Any], dotted: str, where: str) -> Any:
    value: Any = row
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            keys = ", ".join(map(str, row))
            raise PromptError(f"{where} has no column {dotted}; its columns are {keys}")
        value = value[key]
    return value


def _text(value: Any, name: str, where: str) -> Text:
    """Check that a value is a non-empty string or list of token ids."""
    is_tokens = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    if value is None or (isinstance(value, str) and not value.strip()) or (is_tokens and not value):
        raise EmptyTextError(f"{where} has an empty {name}; fill it or leave the line out")
    if isinstance(value, str):
        if HALF_PAIR.search(value):
            raise PromptError(f"{where} has half of a UTF-16 pair in its {name}; repair the text")
        return value
    if is_tokens:
        return value
    kind = type(value).__name__
    raise PromptError(f"{where} has a {kind} as {name}; wanted a string or a list of token ids")
