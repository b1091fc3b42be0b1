"""Programs in processes of their own, and the processors that they can be started for."""

import gc
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.processor import GENERIC, compile_flags, machine_level, usable_levels

# `paceline` comes first, as in each of its programs
IMPORTED = [
    *("paceline", "torch", "torch._dynamo", "accelerate", "datasets"),
    *("transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5"),
    *("paceline.train", "paceline.train.sweep", "paceline.bench", "paceline.measure"),
    *("paceline.cli.main", "rouge_score.rouge_scorer", "reasoning_gym"),
]
_COMMAND = "from paceline.cli.main import main; main()"


class Program:
    """A Python program, as text: it has started, and `wait` is for its end."""

    def __init__(
        self,
        text: str,
        arguments: Sequence[Any] = (),
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)  # before it starts
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("out", "err")]
        self._arguments = [*map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        given = (text, self._arguments, cwd or Path.cwd(), environment, self._streams)
        self._process = context.Process(target=_run, args=given)
        self._process.start()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """As `os.kill` does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Its exit code, and what it wrote."""
        self._process.join()
        out, err = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        code = self._process.exitcode
        assert code is not None
        self._process.close()
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._arguments, code, out, err)


def run_command(cwd: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command line of Paceline, in a process of its own."""
    return Program(_COMMAND, arguments, cwd=cwd).wait()


def spare_collections() -> None:
    """Leave what there is out of collections of garbage, and have fewer of them."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _run(
    text: str,
    arguments: list[str],
    cwd: Path,
    environment: dict[str, str],
    streams: Sequence[Path],
) -> None:
    for descriptor, stream in enumerate(streams, start=1):
        opened = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()  # the process that this one was copied from has that of an earlier test
    os.environ.update(environment)
    os.chdir(cwd)
    spare_collections()
    torch.set_num_threads(1)  # OpenMP has read its variable
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})


LEVEL_FLAGS = {level: compile_flags(level) for level in usable_levels()}
LEVEL_FLAGS.setdefault(machine_level(), ())
if platform.machine() in ("x86_64", "AMD64"):
    LEVEL_FLAGS[GENERIC] = ("-march=x86-64", "-Wno-psabi")
