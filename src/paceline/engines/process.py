"""Starting an engine's server, waiting until it answers, and stopping it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engines.client import Client
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.progress import Progress

_LAST_LINES = 3  # of a log, in an error
_POLL_S = 0.5
_STOP_S = 30.0


class ServerProcess:
    """A server of ours, on a port of this machine; a context that stops it.

    Attributes:
        url: Where it answers.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Raises:
            UsageError: There is no such program.
        """
        program = shutil.which(command[0])
        if program is None:
            raise UsageError(
                f"{command[0]} is not installed here, or not on the PATH; install the engine, name its "
                "program with --set engine.program=/path/to/it, or give --url"
            )
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._name = Path(command[0]).name
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [program, *command[1:]],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # its workers are stopped with it, and not by Ctrl-C
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, seconds: float, progress: Progress) -> Client:
        """Wait for its /health.

        Raises:
            EngineError: It ended, or took longer; the message has the last lines of its log.
        """
        client = Client(self.url)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            progress("starting the server", int(passed), int(seconds))
            if self._process.poll() is not None:
                raise EngineError(f"{self._name} ended while it was starting; {self._last_words()}")
            if _listens(self.url):
                with suppress(EngineError):
                    client.get_text("/health")
                    return client
            time.sleep(_POLL_S)
        raise EngineError(f"{self._name} did not answer in {seconds:.0f} s; {self._last_words()}")

    def last_words(self) -> str:
        """The end of its log, if it has ended by itself; else nothing."""
        return "" if self._process.poll() is None else f"; it ended: {self._last_words()}"

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        text = self._log.read_text("utf-8", errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return f"see {self._log} ({' / '.join(lines[-_LAST_LINES:])[-300:] or 'empty'})"


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(url: str) -> bool:
    port = int(url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
