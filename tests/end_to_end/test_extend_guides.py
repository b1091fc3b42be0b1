"""What the guides "add a ..." show is one new file outside the package, and works as printed."""

import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ADDED = ["rule", "divergence", "task", "policy"]


def blocks(guide: str, language: str) -> list[str]:
    text = (GUIDES / guide).read_text("utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [content for found, content in fenced if found == language]


def commands(guide: str) -> list[list[str]]:
    shell = "".join(blocks(guide, "")).replace("\\\n", " ")
    return [shlex.split(os.path.expandvars(line)) for line in shell.splitlines()]


@pytest.mark.parametrize("what", ADDED)
def test_every_file_and_every_command_of_the_guide_works(
    what: str, run, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    guide = f"add_a_{what}.md"
    for name, file in (("TARGET", "target"), ("DRAFT", "draft"), ("PROMPTS", "corpus.jsonl")):
        monkeypatch.setenv(name, str(pair_folder / file))
    monkeypatch.setenv("TEXT", str(pair_folder / "corpus.jsonl"))
    monkeypatch.chdir(tmp_path)
    files = blocks(guide, "python")
    assert files
    for content in files:
        name = content.split("\n", 1)[0].removeprefix("# ")
        Path(name).write_text(content, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for script in sorted(Path.cwd().glob("check_*.py")):
        runpy.run_path(str(script))
    called = commands(guide)
    assert called
    printed: list[str] = []
    for words in called:
        code, out, err = run(*words[1:], *SMALL.get(words[1], ()))
        assert code == 0, err
        printed.append(out)
    SEEN[what](printed, tmp_path)


# the models of tests hold short texts
SMALL = {
    "analyze": ["--set", "num_prompts=4", "--set", "max_new_tokens=8"],
    "align": [
        *("--set", "max_prompt_tokens=8", "--set", "max_completion_tokens=16"),
        *("--set", "data.held_out_from_train=2", "--set", "evaluation.max_new_tokens=16"),
    ],
}


def lines_of(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def _rule(printed: list[str], folder: Path) -> None:
    assert "NearlyBest 0.5" in printed[0]


def _divergence(printed: list[str], folder: Path) -> None:
    manifest = json.loads((folder / "runs/skew/manifest.json").read_text())
    (term,) = manifest["config"]["objective"]
    assert term == {"import": "skew_kl:SkewKL", "weight": 1.0, "skew": 0.1}
    rows = [json.loads(line) for line in lines_of(folder / "runs/skew/metrics.jsonl")]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-5:]) < sum(losses[:5])


def _task(printed: list[str], folder: Path) -> None:
    written, tested = (set(lines_of(folder / f"counting{end}.jsonl")) for end in ("", "_test"))
    assert (len(written), len(tested), written & tested) == (100, 100, set())
    for run_name in ("counting", "pairs"):
        rows = [json.loads(line) for line in lines_of(folder / f"runs/{run_name}/rows.jsonl")]
        assert not any("error" in row for row in rows)
        assert all(0 <= score <= 1 for row in rows for score in row["sums"]["score"])


def _policy(printed: list[str], folder: Path) -> None:
    assert printed[0].strip()
    rows = [json.loads(line) for line in lines_of(folder / "runs/policy/rows.jsonl")]
    policies = [[row["setting"].get(key) for key in ("policy", "policy_step")] for row in rows]
    assert ["WarmingUp", 2] in policies


SEEN = {"rule": _rule, "divergence": _divergence, "task": _task, "policy": _policy}
