"""Starting an engine's server, waiting until it answers, and stopping it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.engines.client import Client, check_packages
from paceline.errors import EngineError, UsageError
from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.progress import Progress

_LAST_LINES = 3  # of a log, in an error
_LOG_END = 20_000  # bytes of a log that are searched for its errors
_FAULT = re.compile(r"error|abort|exception|refused", re.IGNORECASE)
# A server of ours would ask for a key that we do not know.
_KEYS = ("LLAMA_API_KEY", "VLLM_API_KEY")
_POLL_S = 0.5
_STOP_S = 30.0
_DIES_S = 2.0


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
        program = find_program(command[0])
        check_packages()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._name = Path(command[0]).name
        self._stack = ExitStack()
        inherited = {name: value for name, value in os.environ.items() if name not in _KEYS}
        with storage_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            stream = log.open("wb")
        with stream:
            self._process = subprocess.Popen(
                [program, *command[1:]],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=inherited | dict(environment or {}),
                start_new_session=True,  # its workers are stopped with it, and not by Ctrl-C
            )

    def __enter__(self) -> ServerProcess:
        self._stack.callback(self.stop)
        self._stack.enter_context(_stopped_by_signals())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_ready(self, seconds: float, progress: Progress) -> Client:
        """Wait for its /health.

        Raises:
            EngineError: It ended, or took longer; the message has the last lines of its log.
        """
        client = Client(self.url)
        self._stack.callback(client.close)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            progress("starting the server", int(passed), int(seconds))
            if self._process.poll() is not None:
                raise EngineError(
                    f"{self._name} ended while it was starting{self._signal_name()}; "
                    f"{self._last_words()}"
                )
            if _listens(self.url):
                with suppress(EngineError):
                    client.get_text("/health")
                    return client
            time.sleep(_POLL_S)
        raise EngineError(f"{self._name} did not answer in {seconds:.0f} s; {self._last_words()}")

    @property
    def crashed(self) -> bool:
        """Whether it was ended by a segmentation fault."""
        return self._process.poll() == -signal.SIGSEGV

    def _signal_name(self) -> str:
        code = self._process.poll() or 0
        return f" (killed by {signal.Signals(-code).name})" if code < 0 else ""

    def last_words(self) -> str:
        """The end of its log, if it has ended by itself; else nothing."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DIES_S)  # a closed connection is seen before the end of the process
        return "" if self._process.poll() is None else f"; it ended: {self._last_words()}"

    def stop(self) -> None:
        """End it and all that it started."""
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        """Where its log is, with the last lines that speak of a fault, else the last lines."""
        with self._log.open("rb") as stream:
            stream.seek(max(0, self._log.stat().st_size - _LOG_END))
            text = stream.read().decode("utf-8", errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        faults = [line for line in lines if _FAULT.search(line)] or lines
        return f"see {self._log} ({' / '.join(faults[-_LAST_LINES:])[-300:] or 'empty'})"


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """A signal that ends this process is an exception meanwhile, so that the server is stopped, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def find_program(name: str) -> str:
    """The path of an engine's program.

    Raises:
        UsageError: There is no such program.
    """
    program = shutil.which(name)
    if program is None:
        raise UsageError(
            f"{name} is not installed here, or not on the PATH; install the engine, name its program "
            "with --set engine.program=/path/to/it, or give --url"
        )
    return program


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
