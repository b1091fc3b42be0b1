"""Tasks: sets of prompts with a metric for the answers.

base.py         interface of tasks; choosing examples and writing them to a file
arithmetic.py   step-by-step sums, scored by accuracy
docstrings.py   one-sentence summaries of Python's documentation, scored by ROUGE
corpora.py      a user's own prompts, or prompt-answer pairs with a metric
scoring.py      metrics and the libraries that compute them
task_choice.py  tasks as configuration values
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
