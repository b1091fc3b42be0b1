"""A crash is no verdict: whatever a command raises, one line and an exit code say so."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from paceline import errors
from paceline.cli.main import app
from support.texts import Run, one_line, refused

# For each command, arguments that get it going and something that it then calls.
BUILD = "paceline.cli.options.build"
CONFIGURED = (
    "draft pretrain generate-data align follow measure analyze verify trajectory perplexity score "
    "bench tune"
)
STARTS = {
    **{name: ((name,), BUILD) for name in CONFIGURED.split()},
    "export": (("export", "m", "--to", "vllm", "--out", "x"), BUILD),
    "decode": (("decode", "--target", "t", "--prompt", "x"), BUILD),
    "play": (
        ("play", "--target", "t", "--draft", "d"),
        "paceline.data.input_checks.InputChecks.pair",
    ),
    "validate": (("validate", "align", "x.yaml"), BUILD),
    "corpus": (("corpus", "--out", "x"), "paceline.data.python_docs.write_python_docs"),
    "task": (("task", "arithmetic", "--out", "x.jsonl"), "paceline.tasks.build_task"),
    "report": (("report", "x"), "paceline.view.write_report"),
    "env": (("env",), "paceline.environment.environment"),
    "inspect": (("inspect", "m"), "paceline.export.model_report.load_model"),
}
COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore

ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, BaseException], Any]:
    """Make a command raise this. -> its arguments."""
    monkeypatch.chdir(tmp_path)

    def arrange(command: str, error: BaseException) -> tuple[str, ...]:
        arguments, place = STARTS[command]

        def fail(*_args: object, **_kwargs: object) -> None:
            raise error

        monkeypatch.setattr(place, fail)
        return arguments

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("it"), 3, "KeyError: 'it'; PACELINE_TRACEBACK=1 prints the traceback$"),
        (KeyboardInterrupt(), 130, "interrupted; training and benches keep what they have written"),
    ],
    ids=["crash", "interrupt"],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_crash_of_any_command_and_its_interruption_are_one_line(
    run: Run, raising: Any, command: str, error: BaseException, code: int, said: str
):
    found, out, err = run(*raising(command, error))
    assert (found, out) == (code, "")
    assert re.search(said, one_line(err))


def test_the_environment_asks_for_tracebacks(
    run: Run, raising: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    code, _, err = run(*raising("env", KeyError("layers.3")))
    assert code == 3
    assert err.startswith("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.ConfigError("wrong key"), 2, "wrong key"),
        (errors.NotReachedError("no setting meets it"), 1, "no setting meets it"),
        (errors.TrainingError("the loss is nan"), 3, "the loss is nan"),
        (errors.StoppedError("stopped after step 7"), 130, "stopped after step 7"),
        (errors.GenerationError("3 workers died"), 3, "3 workers died"),
        (errors.StorageError("no room in /x"), 3, "no room in /x"),
        (MemoryError(), 3, "memory ran out: lower batch_size"),
        (OutOfMemoryError("CUDA out of memory"), 3, "memory ran out (CUDA out of memory)"),
        (RuntimeError(ALLOCATOR), 3, "memory ran out (DefaultCPUAllocator"),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "the disk is full"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 3, "memory ran out"),
        (EOFError("Ran out of input"), 3, "EOFError: Ran out of input"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 3, "BrokenPipeError"),
        (RecursionError("maximum depth"), 3, "RecursionError: maximum depth"),
        (ValueError("a\nb\nc"), 3, "ValueError: a b c"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_kind_of_error_has_its_exit_code(
    run: Run, raising: Any, error: BaseException, code: int, said: str
):
    found, _, err = run(*raising("measure", error))
    assert found == code
    assert said in one_line(err)


def test_only_a_verdict_exits_with_1():
    """Every class of the tree: 1 is for what was measured and found wanting, nothing else."""
    classes = [
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, errors.PacelineError)
    ]
    verdicts = {found.__name__ for found in classes if found.exit_code == 1}
    assert verdicts == {"ExportError", "NotReachedError"}
    usage = {found for found in classes if found.exit_code == 2}
    assert usage == {found for found in classes if issubclass(found, errors.UsageError)}


def test_output_that_a_full_disk_does_not_take_is_an_error_and_not_a_success():
    """Unbuffered, too: then a library may write first and keep the error to itself."""
    for unbuffered in ("", "1"):
        program = (
            "from paceline.cli.main import main; import sys; "
            "sys.argv = ['paceline', '--help']; main()"
        )
        done = subprocess.run(
            ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$1" > /dev/full', "sh", program],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": ":".join(sys.path),
                "PYTHONUNBUFFERED": unbuffered,
            },
        )
        assert done.returncode == 3, done.stderr
        assert "No space left" in one_line(done.stderr)


SHORT = ("--set", "max_prompt_tokens=8", "--set", "max_new_tokens=8")


def arguments(command: str, folder: Path, tmp_path: Path, **places: Any) -> list[Any]:
    """A complete command line; a place that is given stands for the right one."""
    corpus = places.get("text", folder / "corpus.jsonl")
    if command == "tune" and "text" not in places:  # which confirms a setting on eight examples
        corpus = folder / "many.txt"
        corpus.write_text("".join(f"the cat number {number}\n" for number in range(40)))
    target, draft = places.get("target", folder / "target"), places.get("draft", folder / "draft")
    output = places.get("output", tmp_path / "out")
    pair = ["--target", target, "--draft", draft]
    run = ["--output", output]
    smoke = ["--set", "num_steps=1", "--set", "batch_size=2", "--set", f"data.train={corpus}"]
    few = ["--layers", "0,1", "--vocabulary", "20"]
    bench = ["--set", f"task={{task: text, corpus: {corpus}}}", *run, *SHORT]
    bench += ["--set", "num_examples=2"]
    return {
        **{name: [*pair, "--prompts", corpus, *SHORT] for name in ("measure", "analyze", "verify")},
        "align": [*pair, *run, *smoke, "--max-prompt-tokens", "8", "--max-completion-tokens", "8"],
        "pretrain": [*run, *smoke, "--set", f"model={target}"],
        "generate-data": [*pair[:2], "--prompts", corpus, *run, *SHORT],
        "bench": [*pair, *bench],
        "tune": [*pair, *bench, "--max-latency", "0.9", "--set", "num_confirmed=8"],
        "perplexity": ["--model", target, "--text", corpus],
        "draft": [*pair[:2], "--out", output, *few, "--text", corpus],
    }[command]


LONG_RUNNING = (
    *("measure", "analyze", "verify", "align", "pretrain", "generate-data", "bench", "tune"),
    *("draft", "perplexity"),
)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_dry_run_reads_no_weights_and_leaves_nothing(
    run: Run, pair_folder: Path, tmp_path: Path, command: str
):
    code, out, err = run(command, *arguments(command, pair_folder, tmp_path), "--dry-run")
    assert code == 0, err
    assert all(line.startswith("paceline: note: ") for line in err.splitlines())
    assert "llama of 4 layers" in out
    assert out.endswith("These checks passed. Nothing was run.\n")
    assert not (tmp_path / "out").exists()
    if command == "measure":
        assert "(fewer than num_prompts 32) of " in out
    if command in ("measure", "perplexity"):
        _, printed, _ = run(
            command, *arguments(command, pair_folder, tmp_path), "--dry-run", "--json"
        )
        lines = out.splitlines()[:-1]
        assert json.loads(printed) == {"dry_run": True, "checks": lines}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_missing_text_and_weights_that_were_cut_off_are_said_before_weights_are_read(
    run: Run, pair_folder: Path, tmp_path: Path, command: str
):
    missing, cut = tmp_path / "nowhere.jsonl", tmp_path / "cut"
    shutil.copytree(pair_folder / "target", cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for faults in ({"text": missing}, {"target": cut}):
        line = refused(run, command, *arguments(command, pair_folder, tmp_path, **faults))
        assert str(*faults.values()) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
def test_a_disk_without_room_for_checkpoints_is_said_first(
    run: Run, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _path: SimpleNamespace(total=10, used=9, free=1)
    )
    code, _, err = run("align", *arguments("align", pair_folder, tmp_path))
    assert code == 3
    assert "needs about" in one_line(err)
    assert not (tmp_path / "out").exists()


def test_a_reader_that_ends_is_no_error():
    program = [sys.executable, "-m", "paceline", "analyze", "-h"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
