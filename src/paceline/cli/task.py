"""`paceline task`: a task's examples as a file, to train on or to look at."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import stderr, stdout


def task(
    name: Annotated[str, typer.Argument(help="arithmetic, docstrings, text or pairs.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    split: Annotated[str, typer.Option(help="train or test; no example is in both.")] = "train",
    count: Annotated[int, typer.Option(help="How many examples.")] = 1000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same examples.")] = 0,
    overrides: options.Overrides = None,
) -> None:
    """Write a task's examples to a file.

    Each has its reference answer: text for `pretrain` and `align`.
    """
    from paceline.config import apply_override
    from paceline.errors import UsageError
    from paceline.tasks import build_task, write_examples

    if split not in ("train", "test"):
        raise UsageError(f"split must be train or test, got {split}")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; choose another file, or give --overwrite")
    values: dict[str, object] = {"task": name}
    for override in overrides or ():
        apply_override(values, override)
    num_distinct = write_examples(build_task(values), split, count, out, seed)
    repeats = "" if num_distinct == count else f", {num_distinct} distinct"
    stdout.print(f"{out}: {count} examples{repeats}")
    if num_distinct < count / 2:
        stderr.print(
            f"paceline: warning: only {num_distinct} of {count} examples are distinct; ask for fewer, "
            "or for a larger task, such as --set max_terms=6 for arithmetic"
        )
