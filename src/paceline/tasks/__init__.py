"""Tasks: sets of prompts with a metric for the answers.

base.py           interface of tasks; choosing examples and writing them to a file
arithmetic.py     step-by-step sums, scored by accuracy
text_pairs.py     pairs to train encoder-decoders on: translations, summaries
docstrings.py     one-sentence summaries of Python's documentation, scored by ROUGE
task_prompts.py   examples as prompts in tokens, scores of answers in tokens
corpora.py        a user's own prompts, or prompt-answer pairs with a metric
row_task.py       base of tasks on rows of a data set: templates, few-shot examples, chats
translation.py    BLEU and chrF
summarization.py  ROUGE
math_problems.py  word problems, scored by accuracy; numbers.py reads the final number
questions.py      closed questions, scored by exact match and F1
code_problems.py  functions, scored by their tests; execution.py starts judge.py, which runs both;
                  barriers.py says what is closed to them
open_chat.py      messages of users, for speed and agreement
scoring.py        metrics and the libraries that compute them
task_choice.py    tasks as configuration values
"""

from paceline.tasks.arithmetic import Arithmetic
from paceline.tasks.base import OwnTask, Split, Task, TaskExample, write_examples
from paceline.tasks.code_problems import Code
from paceline.tasks.corpora import Pairs, PlainText
from paceline.tasks.docstrings import Docstrings
from paceline.tasks.math_problems import GSMSymbolic, Math
from paceline.tasks.open_chat import Chat
from paceline.tasks.questions import Questions
from paceline.tasks.summarization import Summarization
from paceline.tasks.task_choice import AnyTask, TaskChoice, build_task
from paceline.tasks.translation import Translation

__all__ = [
    "AnyTask",
    "Arithmetic",
    "Chat",
    "Code",
    "Docstrings",
    "GSMSymbolic",
    "Math",
    "OwnTask",
    "Pairs",
    "PlainText",
    "Questions",
    "Split",
    "Summarization",
    "Task",
    "TaskChoice",
    "TaskExample",
    "Translation",
    "build_task",
    "write_examples",
]
