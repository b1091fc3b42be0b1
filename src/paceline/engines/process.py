"""Server processes: start one, wait until it is ready, connect to it, stop it."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cache import cache_directory
from paceline.engines.client import Client, api_key, check_packages
from paceline.engines.commands import server_command
from paceline.errors import EngineError, UsageError, shorten
from paceline.processes import end_with_parent, environment_for_engines, last_lines, stop_groups
from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from paceline.engines.commands import EngineChoice
    from paceline.engines.contract import Setup
    from paceline.engines.servers import Server
    from paceline.progress import Progress


_LAST_LINES = 3  # of a log, in an error message
_LONGEST = 400  # characters of an error message
_LOG_TAIL = 64_000  # bytes at the end of a log: vLLM raises its cause again, several times
# Not passed on, because the server would require an API key.
_KEYS = ("LLAMA_API_KEY", "VLLM_API_KEY")
_POLL_S = 0.5
_STOP_S = 30.0
_EXIT_S = 2.0


class ServerProcess:
    """A server process on 127.0.0.1; as a context manager it stops the process at exit.

    Attributes:
        url: URL of the server.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, with its output in `log`; raises UsageError if it is not installed."""
        program = find_program(command[0])
        check_packages()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._name = Path(command[0]).name
        shared = environment_for_engines()
        inherited = {name: value for name, value in shared.items() if name not in _KEYS}
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
                start_new_session=True,  # stop() ends its workers too; Ctrl-C does not reach them
                preexec_fn=end_with_parent,
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, seconds: float, progress: Progress) -> Client:
        """Wait until /health answers; raises EngineError with the end of the log if it does not."""
        client = Client(self.url)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            progress("starting the server", int(passed), int(seconds))
            if self._process.poll() is not None:
                raise EngineError(
                    f"{self._name} ended while it was starting{self._signal_name()}; "
                    f"{self._log_excerpt()}"
                )
            with suppress(EngineError):
                client.ask("GET", "/health")
                return client
            time.sleep(_POLL_S)
        raise EngineError(f"{self._name} did not answer in {seconds:.0f} s; {self._log_excerpt()}")

    def _signal_name(self) -> str:
        code = self._process.poll() or 0
        return f" (killed by {signal.Signals(-code).name})" if code < 0 else ""

    def logged(self, text: str) -> bool:
        return text.encode() in self._log.read_bytes()

    def last_words(self) -> str:
        """Return an excerpt of the log if the process has ended, else an empty string."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)  # its connections close before the process ends
        return "" if self._process.poll() is None else f"; it ended: {self._log_excerpt()}"

    def stop(self) -> None:
        """Stop the process and its children."""
        try:
            stop_groups([self._process], _STOP_S)
        finally:
            self._process.wait()

    def _log_excerpt(self) -> str:
        """The path of the log with the error of a process that failed, or else its last lines."""
        lines = [" ".join(line.split()) for line in last_lines(self._log, _LOG_TAIL)]
        errors = (re.search(r"\w+Error: .*", line) for line in lines if "WARNING" not in line)
        causes = [error[0] for error in errors if error and "root cause" not in error[0]]
        failed = (self._process.poll() or 0) > 0
        said = causes[-1] if failed and causes else " / ".join(lines[-_LAST_LINES:])[-_LONGEST:]
        return f"see {self._log} ({shorten(said, _LONGEST) or 'empty'})"


def find_program(name: str) -> str:
    """Return the path of an engine's program; raises UsageError if it is not installed."""
    program = shutil.which(str(Path(name).expanduser()) if name.startswith("~") else name)
    if program is None:
        raise UsageError(
            f"{name} is not installed here, or not on the PATH; install the engine, or give its "
            "program with --set engine.program=PATH --allow-program PATH; to measure a running "
            "server, give --url"
        )
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client_of(choice: EngineChoice) -> Client:
    """Return a client for `choice.url`; raises UsageError if the API key's variable is not set."""
    assert choice.url is not None, "only for running servers"
    return Client(choice.url, api_key(choice.api_key_env, [choice.url]))


def check_choice(choice: EngineChoice) -> None:
    """Raise UsageError for an invalid URL, key or option, or a missing package or program."""
    if choice.kind.in_process:
        return
    if choice.url is not None:
        api_key(choice.api_key_env, [choice.url])
    check_packages()
    if choice.url is None:
        find_program(choice.program or choice.server.program[0])


@contextmanager
def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Generator[Server]:
    """Start a server and connect to it; stop it when the context ends, or the calling thread."""
    port = free_port()
    command = server_command(choice, setup, port)
    role = "plain" if setup.drafting is None else "drafting"
    log = cache_directory("logs") / f"{choice.engine}-{role}-{port}.log"
    environment = choice.server.environment((setup.drafting and setup.drafting.rule) or "")
    with (
        ServerProcess(command, port, log, environment) as server,
        closing(server.wait_until_ready(choice.start_seconds, progress)) as client,
    ):
        choice.server.check_started(setup, server.logged)
        try:
            yield choice.server(client, choice.model)
        except EngineError as error:
            raise EngineError(f"{error}{server.last_words()}") from error
