"""An engine that is started here, for as long as it is needed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.engines.choice import connect, server_command, server_environment
from paceline.engines.process import ServerProcess, free_port
from paceline.errors import EngineError
from paceline.records import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.engines.choice import EngineChoice
    from paceline.engines.commands import Drafting
    from paceline.engines.contract import Engine
    from paceline.progress import Progress


@contextmanager
def started(
    choice: EngineChoice,
    target: str,
    drafting: Drafting | None,
    *,
    max_length: int,
    dtype: str,
    progress: Progress,
) -> Iterator[Engine]:
    """A server with this target and draft; it is stopped when the context ends.

    Args:
        choice: The engine.
        target: What it is given as target.
        drafting: How it drafts; None: it decodes alone.
        max_length: Tokens of the longest request.
        dtype: What it computes in; auto: its own choice.
        progress: Called while it starts.

    Raises:
        UsageError: Its program is not installed.
        EngineError: It does not start, or something in the context fails; with the end of its log if it
            died.
    """
    port = free_port()
    command = server_command(
        choice, target, drafting, port=port, max_length=max_length, dtype=dtype
    )
    role = "plain" if drafting is None else "drafting"
    log = cache_root() / "logs" / f"{choice.engine}-{role}-{port}.log"
    with ServerProcess(command, port, log, server_environment(choice)) as server:
        client = server.wait_until_ready(choice.start_seconds, progress)
        try:
            yield connect(choice, client)
        except EngineError as error:
            raise EngineError(f"{error}{server.last_words()}") from error
