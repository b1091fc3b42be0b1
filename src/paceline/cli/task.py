"""`paceline task`: write a task's examples to a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import stderr, stdout


def task(
    name: Annotated[str, typer.Argument(help="Task, such as arithmetic or translation.")],
    out: Annotated[Path, typer.Option(help="Output file (.jsonl).")],
    split: Annotated[str, typer.Option(help="train or test; the two are disjoint.")] = "train",
    count: Annotated[int, typer.Option(help="Number of examples.")] = 1000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    overrides: options.Overrides = None,
) -> None:
    """Write a task's examples to a file.

    Each line holds a prompt and its reference answer, as `pretrain` and `align` read them.
    """
    from paceline.cli.output_paths import check_output_file
    from paceline.config import apply_override
    from paceline.errors import UsageError
    from paceline.permissions import given
    from paceline.tasks import build_task, write_examples

    if split not in ("train", "test"):
        raise UsageError(f"split must be train or test, got {split}")
    if count >= sys.maxsize:
        raise UsageError(f"--count {count} is too large; give the number of examples to write")
    check_output_file(out)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; choose another file or add --overwrite")
    values: dict[str, object] = {"task": given(name)}
    for override in overrides or ():
        apply_override(values, override)
    num_distinct = write_examples(build_task(values), split, count, out, seed)
    repeats = "" if num_distinct == count else f", {num_distinct} distinct"
    stdout.print(f"{out}: {count} examples{repeats}")
    if num_distinct < count / 2:
        stderr.print(
            f"paceline: warning: only {num_distinct} of {count} examples are distinct; lower "
            "--count or make the task larger, for example with --set max_terms=6 for arithmetic"
        )
