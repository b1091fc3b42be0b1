"""Damaged inputs, by their number: no traceback, and an exit code that the help names.

    PYTHONPATH=tests .venv/bin/python -m soak.fuzz --count 100000
    PYTHONPATH=tests .venv/bin/python -m soak.fuzz --only 31415       one input, with its traceback

An input is a good file or command line with up to three random changes; its number is its seed.
Child processes run a few hundred each, so that one that dies or hangs is one failure. A file may
take all memory or time, so those are counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paceline.cli.main import SCHEMAS, main
from paceline.cli.options import schema_of
from paceline.config import fields_of
from support.configs import small
from support.data import write_lines
from support.gguf_files import written
from support.processes import run_command
from support.runs import write_pair

PER_CHILD, SECONDS, MEMORY = 250, 20, 20 << 30
SHORT = ("--max-prompt-tokens", "30", "--max-new-tokens", "8")
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 1e30, float("nan"), 10**400, "", "x", "a\ud800", "../..", "/dev/null"),
    *([], {}, [[]], {"a": {"b": 1}}, [None], "\x00", "{{ x }}", "é" * 3000, ["a", 1], "<eos>"),
)
WORDS = ("--resume", "--json", "--set", "-h", "a=b", "x.y=[", "--", "-1", "é", "", "--seed", "1e9")


class Case(NamedTuple):
    """A command line, and the file of its working directory that is damaged; "": its words are."""

    words: tuple[str, ...]
    file: str = ""


def base(folder: Path) -> Path:
    """Good inputs of all cases."""
    write_pair(folder)
    shutil.copytree(folder / "target", folder / "m")
    (folder / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}"
    )
    chats = [{"messages": [{"role": "user", "content": f"say {n}"}]} for n in range(3)]
    rows = [{"prompt": f"the {n} ran", "completion": " in"} for n in range(3)]
    write_lines(folder / "chats.jsonl", *chats)
    write_lines(folder / "rows.jsonl", *rows, {"text": "the men ran in and sat near the fire"})
    (folder / "prompts.txt").write_text("the cat\nthe dog ran\nin an inn\n")
    written(folder / "m.gguf")
    for kind in SCHEMAS:
        values = small(kind, folder, folder / "out").model_dump(mode="json")
        (folder / f"{kind}.yaml").write_text(yaml.safe_dump(values))
    pair = ("--target", "target", "--draft", "draft", "--dtype", "float32", "--json", *SHORT)
    measured = run_command(folder, "measure", *pair, "--prompts", "rows.jsonl", "--gammas", "1")
    (folder / "m.measure.json").write_text(measured.stdout)
    return folder


def cases() -> list[Case]:
    """All kinds of inputs."""
    pair = ("--target", "m", "--draft", "draft")
    data = ("generate-data", "--target", "m", "--output", "out", "--dry-run", *SHORT)
    found = [
        Case(("validate", kind, f"{kind}.yaml", "--allow-program", "vllm"), f"{kind}.yaml")
        for kind in SCHEMAS
    ]
    for file in ("rows.jsonl", "chats.jsonl", "prompts.txt"):
        found += [Case((*data, "--prompts", file), file)] * 3
        found.append(Case(("measure", *pair, "--prompts", file, "--dry-run", *SHORT), file))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        found += [Case((*data, "--prompts", "chats.jsonl"), f"m/{file}")] * 2
    for file in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        found.append(Case(("inspect", "m"), f"m/{file}"))
    found += [Case(("inspect", "m.gguf"), "m.gguf")]
    found += [Case(("report", "m.measure.json"), "m.measure.json")] * 2
    found += [Case(("follow", "--config", "follow.yaml", "--dry-run"), "follow.yaml")]
    found += [Case((*data, "--prompts", "chats.jsonl")), Case(("validate", "align", "align.yaml"))]
    return found + [Case((name,)) for name in sorted(SCHEMAS)]


def damaged(data: bytes, name: str, rng: random.Random) -> bytes:
    """A file with random changes: of its bytes, or of a value if it is JSON or YAML."""
    for _ in range(rng.randint(1, 3)):
        how = rng.random()
        if how < 0.5 and name.endswith((".json", ".jsonl", ".yaml")):
            data = _changed_value(data, name, rng)
        elif name.endswith((".gguf", ".safetensors")) and how < 0.8:
            data = _changed_bytes(data, rng, min(len(data), 3000))  # the header
        else:
            data = _changed_bytes(data, rng, len(data))
    return data


def _changed_bytes(data: bytes, rng: random.Random, size: int) -> bytes:
    at, count = rng.randrange(size + 1), rng.choice((1, 1, 2, 8, 100))
    new = rng.choice((b"", rng.randbytes(count), data[at : at + count] * 2, b"\xff" * count, b'"'))
    return data[:at] if rng.random() < 0.1 else data[:at] + new + data[at + count :]


def _changed_value(data: bytes, name: str, rng: random.Random) -> bytes:
    try:
        text = data.decode()
        if name.endswith(".jsonl"):
            lines = text.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(_changed(json.loads(lines[at]), rng))
            return "\n".join(lines).encode()
        read = yaml.safe_load if name.endswith(".yaml") else json.loads
        value = _changed(read(text), rng)
        return (yaml.dump(value) if name.endswith(".yaml") else json.dumps(value)).encode()
    except (ValueError, yaml.YAMLError, RecursionError, IndexError):  # it was damaged before
        return data


def _changed(value: Any, rng: random.Random) -> Any:
    """A value in which something has another value, another name, or is missing."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return value | {str(rng.choice(STRANGE))[:50]: value[key]}
            case _:
                return value | {key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(value[at], rng), *value[at + rng.randint(0, 1) :]]
    return rng.choice(STRANGE)


def words_of(case: Case, rng: random.Random) -> list[str]:
    """The command line; with random options if it is what is damaged."""
    words = list(case.words)
    if case.file:
        return words
    keys = list(fields_of(schema_of(words[0]))) if words[0] in SCHEMAS else ["a"]
    for _ in range(rng.randint(1, 4)):
        key = rng.choice(keys)
        value = str(rng.choice(STRANGE)).replace("\x00", "0").replace("\ud800", "?")
        option = rng.choice(([f"--{key.replace('_', '-')}", value], ["--set", f"{key}={value}"]))
        words[rng.randint(1, len(words)) :] = rng.choice((option, [rng.choice(WORDS)], []))
    if "--dry-run" not in words and words[0] != "validate":
        words.append("--dry-run")
    return [word for word in words if "\x00" not in word]


def run(number: int, folder: Path, known: list[Case]) -> tuple[str, str]:
    """One input. -> what came of it, and what was said."""
    rng = random.Random(number)
    case = rng.choice(known)
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path in folder.iterdir():
        if path.name not in ("work", "cache"):
            (work / path.name).symlink_to(path)
    words = words_of(case, rng)
    if case.file:
        place = work / case.file
        if place.parent != work:
            place.parent.unlink()
            shutil.copytree(folder / place.parent.name, place.parent, copy_function=os.symlink)
        data = place.read_bytes()
        place.unlink()
        place.write_bytes(damaged(data, place.name, rng))
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["paceline", *words]
    with contextlib.chdir(work), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    said = err.getvalue()
    if "memory ran out" in said:
        return "memory", ""
    wrong = code not in (0, 1, 2, 3) or re.search("PACELINE_TRACEBACK|Traceback", said)
    return (
        ("failed", f"{words} {case.file} code {code}: {said[-400:]}") if wrong else (str(code), "")
    )


def child(numbers: range, folder: Path, report: Path) -> None:
    """Run inputs in a forked process; a line for each in `report`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    known = cases()
    with report.open("a") as stream:
        for number in numbers:
            signal.alarm(SECONDS)
            stream.write(json.dumps([number, *run(number, folder, known)]) + "\n")
            stream.flush()
        signal.alarm(0)


def soak(count: int, first: int, log: Path) -> Counter[str]:
    """Run `count` inputs from `first` on. -> how many came to what; failures are in `log`."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder, report = base(Path(place) / "base"), Path(place) / "report"
        os.environ["PACELINE_CACHE"] = str(folder / "cache")
        run(0, folder, cases())  # imports what is imported late
        at, begin = first, time.monotonic()
        while at < first + count:
            report.write_text("")
            numbers = range(at, min(at + PER_CHILD, first + count))
            if (process := os.fork()) == 0:
                child(numbers, folder, report)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            for number, outcome, said in lines:
                found[outcome] += 1
                if outcome == "failed":
                    _note(log, number, said)
            at += len(lines)
            if status:  # by the input behind the last line
                found["time" if status == -signal.SIGALRM else "failed"] += 1
                _note(log, at, f"the process ended with {status}")
                at += 1
            rate = (at - first) / (time.monotonic() - begin)
            print(f"{at - first:,} of {count:,}, {rate:.0f} a second: {dict(found)}", flush=True)  # noqa: T201
            shutil.rmtree(folder / "cache", ignore_errors=True)
    return found


def _note(log: Path, number: int, said: str) -> None:
    with log.open("a") as stream:
        stream.write(json.dumps({"number": number, "said": said}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--log", type=Path, default=Path("runs/soak/fuzz.jsonl"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    given.log.parent.mkdir(parents=True, exist_ok=True)
    if given.only is not None:
        os.environ["PACELINE_TRACEBACK"] = "1"
        with tempfile.TemporaryDirectory() as place:
            print(*run(given.only, base(Path(place) / "base"), cases()), sep="\n")  # noqa: T201
    else:
        raise SystemExit(int(soak(given.count, given.first, given.log)["failed"] > 0))
