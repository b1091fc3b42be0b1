"""An engine that is started here, for as long as it is needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.engines.engine_choice import connect, server_command, server_environment
from paceline.engines.process import ServerProcess, free_port
from paceline.errors import EngineError
from paceline.processor import level
from paceline.records import cache_root

if TYPE_CHECKING:
    from collections.abc import Generator

    from paceline.engines.contract import Engine
    from paceline.engines.engine_choice import EngineChoice, Setup
    from paceline.progress import Progress


_AMX_ADVICE = (
    "; on a processor with AMX llama.cpp crashes on some quantised files (llama.cpp issue 20824): "
    "try --set 'engine.options=[--no-repack]'"
)


def _repacks_wrongly(choice: EngineChoice) -> bool:
    return choice.engine == "llamacpp" and level() == "amx" and "--no-repack" not in choice.options


@contextmanager
def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Generator[Engine]:
    """A server of this engine; it is stopped when the context ends.

    `progress` is called while it starts.

    Raises:
        UsageError: Its program is not installed.
        EngineError: It does not start, or something in the context fails; with the end of its log if it
            died.
    """
    port = free_port()
    command = server_command(choice, setup, port)
    role = "plain" if setup.drafting is None else "drafting"
    log = cache_root() / "logs" / f"{choice.engine}-{role}-{port}.log"
    with ServerProcess(command, port, log, server_environment(choice)) as server:
        try:
            client = server.wait_until_ready(choice.start_seconds, progress)
        except EngineError as error:
            advice = _AMX_ADVICE if _repacks_wrongly(choice) and server.crashed else ""
            raise EngineError(f"{error}{advice}") from error
        try:
            yield connect(choice, client)
        except EngineError as error:
            raise EngineError(f"{error}{server.last_words()}") from error
