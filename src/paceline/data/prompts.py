"""Reads prompts, prompt-completion pairs, documents and chats from files and hub data sets.

Sources: `.txt` (one text per line), `.jsonl`, `.parquet`, a directory of these, a pattern such as
`runs/*/data`, or a hub data set.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.config import Options, StrictModel
from paceline.core.top_k_tail import TopScores
from paceline.errors import EmptyTextError, PacelineError, PromptError, shorten
from paceline.fingerprints import files_fingerprint
from paceline.models.chat_text import HALF_PAIR, Message, messages_of, template_kwargs_of, tools_of
from paceline.places import neighbour
from paceline.records import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Text = str | list[int]

ChatOrRaw = Annotated[bool | None, Options(raw="")]
"""Whether texts are asked as messages of the user; see `tokens.asked`. --chat or --raw."""

_WANTED = "wanted one of prompt, text, messages, tokens"

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_CHATS = frozenset({"messages", "prompt", "completion", "tools", "chat_template_kwargs"})

_TRUNCATED = frozenset({"length", "context"})  # stop reasons written by generate-data


class CorpusConfig(StrictModel):
    """Location of a corpus; a plain string sets `path` only.

    Attributes:
        path: A `.txt`, `.jsonl` or `.parquet` file, a directory of such files, a pattern of these
            such as `runs/*/data`, or a hub data set.
        split: Split of a hub data set; unset: `train`. A directory has the rows of all its files;
            with a split, those that the datasets library finds by the file names.
        subset: Subset of a hub data set, such as `main` of `gsm8k`, or a directory in a directory.
        prompt_field: Column with the prompt, if not `prompt`; `a.b` names a nested column.
        completion_field: Column with the completion; used only together with `prompt_field`.
        tools: Tools for the template of every chat whose row has no column `tools`. A text that is
            asked as a chat, as by `chat: true`, gets them too.
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


NO_COMPLETION = "has a prompt but no completion, and fixed text needs both; add completions"


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
        answer: The text of a completion that is given as tokens, if the row has it.
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
    answer: str = ""
    top: TopScores | None = None
    hidden: bytes | None = None

    @property
    def is_answered(self) -> bool:
        """Whether it can be trained on as it is: it has a completion, or is a document."""
        if self.kind == "chat":
            return self.messages[-1]["role"] == "assistant"
        return self.kind == "document" or self.completion is not None

    def as_chat(self) -> Record:
        """A text as a message of the user, and its completion as the answer; a chat as it is.

        Raises:
            PromptError: it has tokens.
        """
        if self.kind == "chat":
            return self
        texts = (self.text, self.completion)
        if any(isinstance(text, list) for text in texts):
            raise PromptError(f"{self.where} has tokens; wanted a text to send as a message")
        roles = ("user", self.text), ("assistant", self.completion)
        messages = tuple({"role": role, "content": str(text)} for role, text in roles if text)
        return dataclasses.replace(self, kind="chat", text="", completion=None, messages=messages)

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
    files = _data_files(path)
    whole = corpus.split is None and corpus.subset is None
    if files and (whole or not path.is_dir() or _kind_of(files[0]) == ".txt"):
        return itertools.chain.from_iterable(map(_read_file, _one_kind(files, path)))
    local = _kind_of(path) in _SUFFIXES or path.is_absolute() or corpus.path.startswith((".", "~"))
    if local and not path.is_dir():
        raise PromptError(f"no file or directory at {path}; check the path{neighbour(path)}")
    split = corpus.split or "train"
    return _read_data_set(corpus.path, corpus.subset, split, streaming=streaming)


def corpus_fingerprint(corpus: CorpusConfig) -> str:
    """Hash of the local files of a corpus; empty if there are none or they cannot be read."""
    path = Path(corpus.path)
    try:
        files = _data_files(path)
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
            record = record_of(row, where, corpus)
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


def record_of(row: Mapping[str, Any], where: str, corpus: CorpusConfig) -> Record:
    """One row as a record; raises PromptError, or EmptyTextError if it has no text."""
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
        case {"messages": messages}:
            return _chat(row, messages, where, corpus)
        case {"prompt_tokens": [*prompt], "completion_tokens": [*completion]}:
            # Written by `generate-data`; tokenising the texts again could give other tokens.
            prompt = _text(prompt, "prompt_tokens", where)
            found = Record(where, "prompt", prompt, _text(completion, "completion_tokens", where))
            top, hidden = _top_scores(row, len(completion), where), row.get("hidden_states")
            answer = str(row.get("completion") or "")
            return dataclasses.replace(found, answer=answer, top=top, hidden=hidden)
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
    raise kind(f"{where} has the keys {keys}; {_WANTED}, or name the column in prompt_field")


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


def _asked_and_answered(row: Mapping[str, Any], asked: list[Any]) -> list[Any]:
    """Messages of a row with the prompt and the completion as messages; the prompt is context."""
    context = [m | {"weight": 0} if isinstance(m, dict) else m for m in asked]
    answer = row.get("completion")
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return [*context, *answer] if isinstance(answer, list) else context


def _top_scores(row: Mapping[str, Any], count: int, where: str) -> TopScores | None:
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
    return TopScores.of(tokens, log_probs)


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


def _data_files(path: Path) -> list[Path]:
    """The file itself, or the data files below a folder or of a pattern such as `runs/*/data`.

    They are sorted and without hidden ones; none if nothing is there.
    """
    if path.exists() or not glob.has_magic(str(path)):
        return [path] if path.is_file() else _below(path)
    folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    found = sorted(folder.glob(str(path.relative_to(folder))))
    if not found:
        raise PromptError(f"no file or directory matches {path}; check the pattern")
    return [file for match in found for file in _data_files(match)]


def _below(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and _kind_of(path) in _SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _kind_of(path: Path) -> str:
    """The suffix of a file in lower case, without `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _one_kind(files: list[Path], path: Path) -> list[Path]:
    """The files of a directory or pattern; raises PromptError if they are of several kinds."""
    suffixes = set(map(_kind_of, files))
    if len(suffixes) > 1:
        raise PromptError(
            f"{path} holds files of several kinds, {', '.join(sorted(suffixes))}; give each kind "
            "its own directory"
        )
    return files


def _read_file(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a file with their locations. A line of a `.txt` file has one column, `text`.

    Raises:
        PromptError: the file cannot be read; the message names the line.
    """
    match _kind_of(path):
        case ".txt":
            return (({"text": line}, where) for line, where in read_lines(path))
        case ".jsonl":
            return _read_json_lines(path)
        case ".parquet":
            return _read_parquet(path)
    raise PromptError(f"{path} is an unknown kind of file; wanted .txt, .jsonl or .parquet")


def _read_json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    for line, where in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also numbers of too many digits
            reason = f"{where} is not JSON: {shorten(line)}"
            raise PromptError(f"{reason}; write one JSON object per line") from None
        if not isinstance(row, dict):
            raise PromptError(f"{where} is not a JSON object: {shorten(line)}; {_WANTED} as a key")
        yield row, where


def _read_parquet(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    from pyarrow import parquet  # slow to import, and not needed for other files

    number = itertools.count()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    yield _arrow_row(row), f"{path} row {next(number)}"
    except Exception as error:  # of the arrow library, which has its own types
        reason = shorten(" ".join(str(error).split()), 160)
        raise PromptError(f"cannot load {path} as a parquet file: {reason}") from None


def _arrow_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose chats have only the keys that they were written with.

    Arrow gives all objects of a column the keys of each, with None as the value.
    """
    return row | {name: _without_nulls(row[name]) for name in row.keys() & _CHATS}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _read_data_set(
    path: str, subset: str | None, split: str, *, streaming: bool
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of a data set of the hub or of a directory, with their locations.

    `subset`: a configuration of the data set, or a directory in the directory.

    Raises:
        PromptError: it is missing or damaged, or one of the hub names a file elsewhere.
    """
    import datasets  # slow to import, and not needed for files

    if subset is not None and (Path(path) / subset).is_dir():
        path, subset = str(Path(path) / subset), None
    try:
        builder: Any = datasets.load_dataset_builder(path, subset)
        for name in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
            if not (str(name).startswith("hf://") or Path(path).is_dir()):
                raise PromptError(
                    f"the data set {path} names {shorten(str(name), 160)}, and only files of the "
                    "hub are read; copy the file, and set path to it"
                )
        if streaming:
            rows = iter(builder.as_streaming_dataset(split))
        else:
            builder.download_and_prepare()
            rows = iter(builder.as_dataset(split))
        for number, row in enumerate(rows):
            yield _arrow_row(row), f"{path} row {number}"
    except PacelineError:
        raise  # also raised by the consumer of this generator
    except Exception as error:
        # The exception types for a missing or damaged data set depend on the library's version.
        reason = shorten(" ".join(str(error.__cause__ or error).split()), 160)
        raise PromptError(
            f"cannot load {path} (subset {subset}, split {split}) as a file, directory or hub data "
            f"set: {reason}"
        ) from None
