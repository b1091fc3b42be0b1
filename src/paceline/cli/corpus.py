"""`paceline corpus`: text that is on every machine, to try things on."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import stdout


def corpus(
    out: Annotated[Path, typer.Option(help="Directory to write the files to.")],
    package: Annotated[
        list[str] | None,
        typer.Option(help="Docstrings of this installed package, too; may be repeated."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that exist.")
    ] = False,
) -> None:
    """Write Python's documentation as training text.

    Part of it is held out for evaluation, and there are prompts of other kinds.
    """
    from paceline.cli.inputs import Preflight
    from paceline.data.python_docs import (
        PythonDocs,
        package_places,
        write_package_docs,
        write_python_docs,
    )
    from paceline.data.python_tasks import PythonTasks, write_python_tasks
    from paceline.errors import UsageError

    names = (*PythonDocs._fields, *PythonTasks._fields, "pretraining")
    written = [path for name in names if (path := out / f"{name}.jsonl").exists()]
    if written and not overwrite:
        raise UsageError(f"{written[0]} exists already; choose another folder, or give --overwrite")
    Preflight().output(out)  # both before seconds are spent on the rest
    for name in package or ():
        package_places(name)
    files = write_python_docs(out)._asdict() | write_python_tasks(out)._asdict()
    files["pretraining"] = out / "pretraining.jsonl"
    write_package_docs(files["pretraining"], package or ())
    for name, path in files.items():
        with path.open(encoding="utf-8") as stream:
            stdout.print(f"{path}: {sum(1 for _ in stream):,} documents, {name}")
