"""Text that comes from outside: prompts, prompt-completion pairs, documents and chats.

Reads `.txt` (a text a line), `.jsonl`, `.parquet`, a directory of data files or a data set of the hub, and says
which line is wrong. What becomes of a text in training is decided in `sources`; how it becomes
tokens, in `tokens`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.errors import PacelineError, PromptError
from paceline.records import files_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Text = str | list[int]
Message = dict[str, str]

_CUT_OFF = frozenset({"length", "context"})  # as generate-data says it
_WANTED = "wanted one of prompt, text, messages, tokens"


class CorpusConfig(StrictModel):
    """Where text is; a plain string stands for `path` alone.

    Attributes:
        path: A `.txt`, `.jsonl` or `.parquet` file, a directory of data files, or a hub name such as `gsm8k`.
        split: Of a data set; a file has none.
        subset: Of a data set, such as `main` of `gsm8k`.
        prompt_field: Column of the prompt where it is not called so; `a.b` for a nested one.
        completion_field: Column of the completion, the same way.
        limit: Read only the first so many texts.
    """

    path: str = Field(min_length=1)
    split: str = "train"
    subset: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _accept_a_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _completion_needs_prompt(self) -> CorpusConfig:
        if self.completion_field is not None and self.prompt_field is None:
            raise ValueError("completion_field needs prompt_field beside it")
        return self


@dataclass(frozen=True, slots=True)
class Record:
    """One text as it was found; `where` is what an error message calls it.

    A document has `text`, a prompt has `text` and perhaps `completion`, a chat has `messages`.

    Attributes:
        id: As its own row says; None: it says none.
        open_ended: Nothing belongs after it: it was cut off, or its tokens are given with their end.
    """

    where: str
    kind: Literal["document", "prompt", "chat"]
    text: Text = ""
    completion: Text | None = None
    messages: tuple[Message, ...] = ()
    id: str | None = None
    open_ended: bool = False

    @property
    def content(self) -> str:
        """The text alone, the same for duplicates."""
        return json.dumps([self.text, self.completion, self.messages])


def read_records(corpus: CorpusConfig | str | Path) -> list[Record]:
    """Read every text of a corpus.

    Raises:
        PromptError: nothing there, nothing in it, or a malformed line (which is named).
    """
    return list(_records(corpus, streaming=False))


def stream_records(corpus: CorpusConfig | str | Path) -> Iterator[Record]:
    """Every text of a corpus, one at a time: of a data set too large for memory, say.

    A data set's split is then a name, without a slice.

    Raises:
        PromptError: as `read_records`, as far as it is read.
    """
    return _records(corpus, streaming=True)


def corpus_fingerprint(corpus: CorpusConfig) -> str:
    """Tells local text from other text that was at the same place; empty where none can be read."""
    path = Path(corpus.path)
    try:
        files = [path] if path.is_file() else _data_files(path)
        return files_fingerprint(files) if files else ""
    except OSError:
        return ""


def _records(corpus: CorpusConfig | str | Path, *, streaming: bool) -> Iterator[Record]:
    corpus = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=str(corpus))
    path = Path(corpus.path)
    match path.suffix.lower():
        case ".txt":
            found = _read_text(path)
        case ".jsonl":
            found = (_record(row, where, corpus) for row, where in _read_json_lines(path))
        case _ if _kinds(path) == {".txt"}:
            found = itertools.chain.from_iterable(map(_read_text, _data_files(path)))
        case _:
            found = (
                _record(row, where, corpus)
                for row, where in _read_dataset(corpus, streaming=streaming)
            )
    empty = True
    for record in itertools.islice(found, corpus.limit):
        empty = False
        yield record
    if empty:
        raise PromptError(f"{corpus.path} holds no text; it needs at least one line of it")


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with its name."""
    if not path.exists():
        raise PromptError(f"no file at {path}; check the path")
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                where = f"{path} line {number}"
                try:
                    # A byte order mark can only stand at the very beginning.
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise PromptError(f"{where} is not UTF-8; convert the file to UTF-8") from None
                if line:
                    yield line, where
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}; name a text file") from None


def _read_text(path: Path) -> Iterator[Record]:
    for line, where in _read_lines(path):
        yield Record(where, "document", text=line)


def _read_json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    for line, where in _read_lines(path):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise PromptError(
                f"{where} is not JSON: {_shorten(line)}; write an object a line"
            ) from None
        if not isinstance(row, dict):
            raise PromptError(
                f"{where} is not a JSON object: {_shorten(line)}; {_WANTED} as its key"
            )
        yield row, where


def _data_files(folder: Path) -> list[Path]:
    """In order, without what is hidden."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in (".txt", ".jsonl", ".parquet")
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _kinds(folder: Path) -> set[str]:
    """Which kinds of data files a directory holds.

    Raises:
        PromptError: several, of which the datasets library would read one and say nothing.
    """
    kinds = {path.suffix.lower() for path in _data_files(folder)}
    if len(kinds) > 1:
        raise PromptError(
            f"{folder} holds files of several kinds, {', '.join(sorted(kinds))}; give each kind a "
            "directory of its own"
        )
    return kinds


def _read_dataset(
    corpus: CorpusConfig, *, streaming: bool
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """A directory of data files or a data set of the hub, through the datasets library."""
    path = Path(corpus.path)
    parquet = path.suffix.lower() == ".parquet"
    if path.is_file() and not parquet:
        raise PromptError(
            f"cannot read {path}: unknown kind of file; wanted .txt, .jsonl or .parquet"
        )
    if not path.exists() and (path.is_absolute() or corpus.path.startswith((".", "~"))):
        raise PromptError(f"nothing at {path}; check the path")
    # Slow to import, and most runs read a plain file.
    import datasets

    reading: dict[str, Any] = {"path": corpus.path, "name": corpus.subset}
    if parquet:
        reading = {"path": "parquet", "data_files": corpus.path}
    try:
        rows = iter(datasets.load_dataset(**reading, split=corpus.split, streaming=streaming))
        for number in itertools.count():
            row = next(rows, None)
            if row is None:
                return
            assert isinstance(row, dict)
            yield row, f"{corpus.path} row {number}"
    except PacelineError:
        raise  # of whoever reads on: what is yielded is theirs
    except Exception as error:
        # The library raises a dozen kinds of error, by version, for one missing or damaged data set.
        reason = _shorten(" ".join(str(error).split()), 160)
        raise PromptError(
            f"cannot load {corpus.path} (subset {corpus.subset}, split {corpus.split}) as a file, "
            f"directory or hub data set: {reason}"
        ) from None


def _record(row: Mapping[str, Any], where: str, corpus: CorpusConfig) -> Record:
    record = _content(row, where, corpus)
    name, stop_reason = row.get("id"), row.get("stop_reason")
    to_the_token = stop_reason is not None and isinstance(record.completion, list)
    return dataclasses.replace(
        record,
        id=str(name) if isinstance(name, str | int) else None,
        open_ended=to_the_token or stop_reason in _CUT_OFF,
    )


def _content(row: Mapping[str, Any], where: str, corpus: CorpusConfig) -> Record:
    """Make sense of one object, by the columns that were named or by its keys."""
    if corpus.prompt_field is not None:
        completion = None
        if corpus.completion_field is not None:
            completion = _text(_column(row, corpus.completion_field, where), "completion", where)
        prompt = _text(_column(row, corpus.prompt_field, where), corpus.prompt_field, where)
        return Record(where, "prompt", text=prompt, completion=completion)
    match row:
        case {"messages": messages}:
            return Record(where, "chat", messages=_messages(messages, where))
        case {"prompt_tokens": [*prompt], "completion_tokens": [*completion]}:
            # as `generate-data` leaves them: to the token, whatever the texts would become
            return Record(
                where,
                "prompt",
                text=_text(prompt, "prompt_tokens", where),
                completion=_text(completion, "completion_tokens", where),
            )
        case {"prompt": prompt}:
            completion = row.get("completion")
            if completion is not None:
                completion = _text(completion, "completion", where)
            return Record(
                where, "prompt", text=_text(prompt, "prompt", where), completion=completion
            )
        case {"text": text}:
            return Record(where, "document", text=_text(text, "text", where))
        case {"tokens": tokens} if not isinstance(tokens, str):
            return Record(where, "document", text=_text(tokens, "tokens", where))
    keys = ", ".join(map(str, row)) or "none"
    raise PromptError(f"{where} has the keys {keys}; {_WANTED}, or name the column by prompt_field")


def _column(row: Mapping[str, Any], dotted: str, where: str) -> Any:
    value: Any = row
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            keys = ", ".join(map(str, row))
            raise PromptError(f"{where} has no column {dotted}; its columns are {keys}")
        value = value[key]
    return value


def _text(value: Any, name: str, where: str) -> Text:
    """A string, or a list of token numbers, that is not empty."""
    if isinstance(value, str):
        if not value.strip():
            raise PromptError(f"{where} has an empty {name}; fill it or leave the line out")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise PromptError(f"{where} has half of a UTF-16 pair in its {name}; repair the text")
        return value
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        if not value:
            raise PromptError(f"{where} has an empty {name}; fill it or leave the line out")
        return value
    kind = type(value).__name__
    raise PromptError(f"{where} has a {kind} as {name}; wanted a string or a list of token numbers")


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where} has no list of messages; wanted objects with role and content")
    for message in value:
        match message:
            case {"role": str(), "content": str()}:
                continue
        raise PromptError(
            f"{where} has the message {_shorten(str(message))}; wanted role and content as strings"
        )
    if len(value) == 1 and value[0]["role"] == "assistant":
        raise PromptError(
            f"{where} has nothing but an answer; wanted a message to answer before it"
        )
    return tuple(value)


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
