"""Renders chat templates with limits of time, memory and size.

A template is a program of the model's author. Its sandbox keeps it from files and code, but not
from loops without end, and one operation such as `9 ** 9 ** 9` or `'a' * 10 ** 10` cannot be
interrupted in this process. So a copy of this process renders, which is ended at the limits.
There, nothing that a template reads depends on when and where a run renders it.
"""

from __future__ import annotations

import contextlib
import gc
import locale
import multiprocessing
import os
import random
import resource
import signal
import threading
import warnings
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.utils.chat_template_utils import render_jinja_template

from paceline.environment import began
from paceline.errors import InputNote
from paceline.processes import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
"""Time for one chat."""
_MEMORY = 1 << 30  # bytes that the copy may take beyond what this process has
_LONGEST = 64 << 20  # characters of a rendered chat
_LONGEST_ERROR = 1000
_IDLE_S = 1.0  # until the copy ends, as it holds the memory that this process changes or frees


def apply(tokenizer: PreTrainedTokenizerBase, messages: Any, **settings: Any) -> str:
    """`tokenizer.apply_chat_template` without tokenizing; raises RuntimeError at a limit."""
    return _rendered(tokenizer, "apply_chat_template", messages, settings | {"tokenize": False})


def render(tokenizer: PreTrainedTokenizerBase, messages: Any, **settings: Any) -> Any:
    """`render_jinja_template` of transformers; raises RuntimeError at a limit."""
    return _rendered(tokenizer, "render", messages, settings)


class _Copy:
    """A copy of this process with a tokenizer; `key` changes with what it would render."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: tuple[Any, ...]) -> None:
        self.tokenizer = tokenizer
        self.key = key
        self.pipe, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, none of whose locks the copy takes
            self.pid = os.fork()
        if not self.pid:
            _serve(theirs, tokenizer, parent)
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


_lock = threading.Lock()
_copies: list[_Copy] = []  # at most one
_noted: set[datetime] = set()  # beginnings of runs


def _rendered(tokenizer: Any, name: str, messages: Any, settings: dict[str, Any]) -> Any:
    given, start = settings.pop("strftime_now", None), began.get()
    now = datetime.fromisoformat(str(given)) if given else start or datetime.now()
    with _lock:
        found, fault = _ask(tokenizer, (name, messages, settings, now))
    if fault is not None:
        raise RuntimeError(fault)
    text, reads_clock = found
    is_prompt = settings.get("add_generation_prompt", False)  # not a trial of the template
    if reads_clock and is_prompt and now is start and now not in _noted:
        _noted.add(now)
        told = f"the chat template gets the date of the run's start, {now:%Y-%m-%d %H:%M}; set "
        told += "chat_template_kwargs.strftime_now for the same prompts on other days"
        warnings.warn(told, InputNote, stacklevel=3)
    return text


def _ask(tokenizer: Any, request: Any, *, again: bool = True) -> tuple[Any, str | None]:
    key = (os.getpid(), id(tokenizer), str(tokenizer.chat_template), tokenizer.special_tokens_map)
    if not _copies or _copies[0].key != key:
        _end_copy()
        _copies.append(_Copy(tokenizer, key))
    pipe = _copies[0].pipe
    try:
        pipe.send(request)
        if pipe.poll(SECONDS):
            return pipe.recv()
        fault = f"rendering takes more than {SECONDS:.0f} s"
    except (EOFError, OSError):  # it was idle, or it died
        fault = "the process that renders it died"
    except BaseException:  # interrupted: its answer would be taken for that to the next request
        _end_copy()
        raise
    _end_copy()
    return _ask(tokenizer, request, again=False) if again and "died" in fault else (None, fault)


def _end_copy() -> None:
    if _copies and _copies[0].key[0] == os.getpid():  # not that of a process this one is a copy of
        _copies[0].end()
    _copies.clear()


def _serve(pipe: Connection, tokenizer: Any, parent: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process, which gets it too, answers it
        end_with_parent(parent)
        gc.disable()  # nothing of the other process is freed here
        locale.setlocale(locale.LC_TIME, "C")  # names of months and days as engines write them
        _limit_memory()
        while pipe.poll(_IDLE_S):
            pipe.send(_answer(tokenizer, *pipe.recv()))
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without /proc, or a lower limit
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(tokenizer: Any, name: str, messages: Any, settings: Any, now: datetime) -> Any:
    """What `name` gives and whether the template read the clock, or None and the fault."""
    reads: list[datetime] = []
    clock = SimpleNamespace(now=lambda: reads.append(now) or now)
    render_jinja_template.__globals__["datetime"] = clock  # that `strftime_now` reads
    random.seed(0)  # of the filter `random`
    function: Any = render_jinja_template if name == "render" else tokenizer.apply_chat_template
    try:
        found = function(messages, **settings)
        text = found if isinstance(found, str) else found[0][0]
        if len(text) > _LONGEST:
            return None, f"it gives more than {_LONGEST:,} characters"
    except MemoryError:
        return None, f"rendering takes more than {_MEMORY >> 30} GiB of memory"
    except Exception as error:  # a template is a program and can raise anything
        return None, str(error)[:_LONGEST_ERROR]
    return (found, bool(reads)), None
