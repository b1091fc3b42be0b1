"""Start an engine's server for the duration of a context."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cache import cache_directory
from paceline.engines.commands import RULE_IS_SET
from paceline.engines.engine_choice import connect, server_command, server_environment
from paceline.engines.process import ServerProcess, free_port
from paceline.errors import EngineError
from paceline.processor import level

if TYPE_CHECKING:
    from collections.abc import Generator

    from paceline.engines.client import Client
    from paceline.engines.contract import Engine
    from paceline.engines.engine_choice import EngineChoice, Setup
    from paceline.progress import Progress


_AMX_ADVICE = (
    "; on a processor with AMX llama.cpp crashes on some quantised files (llama.cpp issue 20824): "
    "try --set 'engine.options=[--no-repack]'"
)


@contextmanager
def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Generator[Engine]:
    """Start a server and connect to it; stop it when the context ends.

    Raises:
        UsageError: The program is not installed.
        EngineError: The server does not start, or a request fails; with the log if it has ended.
    """
    with running(choice, setup, progress) as client:
        yield connect(choice, client)


@contextmanager
def running(choice: EngineChoice, setup: Setup, progress: Progress) -> Generator[Client]:
    """Start a server and yield its client; stop it when the context ends. Raises as `started`."""
    port = free_port()
    command = server_command(choice, setup, port)
    role = "plain" if setup.drafting is None else "drafting"
    logs = cache_directory("logs") or Path(tempfile.mkdtemp(prefix="paceline-"))
    log = logs / f"{choice.engine}-{role}-{port}.log"
    with ServerProcess(command, port, log, server_environment(choice, setup)) as server:
        try:
            client = server.wait_until_ready(choice.start_seconds, progress)
        except EngineError as error:
            repacks = choice.engine == "llamacpp" and "--no-repack" not in choice.options
            advice = _AMX_ADVICE if repacks and level() == "amx" and server.crashed else ""
            raise EngineError(f"{error}{advice}") from error
        if setup.drafting is not None and setup.drafting.rule and not server.logged(RULE_IS_SET):
            raise EngineError(
                f"{command[0]} started without Paceline's plugin, so it would ignore the rule; "
                "install Paceline in vLLM's environment: pip install '.[vllm]' with its pip"
            )
        try:
            yield client
        except EngineError as error:
            raise EngineError(f"{error}{server.last_words()}") from error
