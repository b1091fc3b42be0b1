"""Tasks: prompts, and how good an answer to them is.

base.py       what a task is; examples chosen by seed, written to a file for training
arithmetic.py sums worked out step by step, right or wrong
docstrings.py Python's documentation in one sentence, ROUGE
corpora.py    a user's own text: prompts to be timed, or pairs to be scored
scoring.py    the libraries that score, and their versions
task_choice.py  every task as a choice that a file can hold
"""

from paceline.tasks.arithmetic import Arithmetic
from paceline.tasks.base import OwnTask, Split, Task, TaskExample, write_examples
from paceline.tasks.corpora import Pairs, PlainText
from paceline.tasks.docstrings import Docstrings
from paceline.tasks.task_choice import AnyTask, TaskChoice, build_task

__all__ = [
    "AnyTask",
    "Arithmetic",
    "Docstrings",
    "OwnTask",
    "Pairs",
    "PlainText",
    "Split",
    "Task",
    "TaskChoice",
    "TaskExample",
    "build_task",
    "write_examples",
]
