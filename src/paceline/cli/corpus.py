"""`paceline corpus`: build a small corpus from Python's documentation."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import stdout


def corpus(
    out: Annotated[Path, typer.Option(help="Directory to write the files to.")],
    package: Annotated[
        list[str] | None, typer.Option(help="Add docstrings of this installed package; repeatable.")
    ] = None,
    dictionary: Annotated[
        Path | None,
        typer.Option(
            help="Write only translation and summary pairs, from this Ding dictionary; see "
            "docs/guides/garden.md."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write Python's documentation as training text.

    Also writes held-out text and prompts, and questions and source code as other domains. With
    --dictionary, writes pairs for encoder-decoders instead.
    """
    from paceline.cli.output_paths import check_output_directory
    from paceline.data import python_docs as docs
    from paceline.data.python_docs import PythonTasks, write_python_tasks
    from paceline.errors import UsageError
    from paceline.tasks.docstrings import PairFiles, write_pairs

    names = (*docs.PythonDocs._fields, *PythonTasks._fields, "pretraining")
    if dictionary is not None:
        names = PairFiles._fields
    check_output_directory(out)  # this and the packages first: the rest takes seconds
    written = [path for name in names if (path := out / f"{name}.jsonl").exists()]
    if written and not overwrite:
        raise UsageError(
            f"{written[0]} exists already; choose another directory or add --overwrite"
        )
    for name in package or ():
        docs.package_places(name)
    if dictionary is not None:
        _print_sizes(write_pairs(out, dictionary, tuple(package or ()))._asdict(), "pairs")
        return
    files = docs.write_python_docs(out)._asdict() | write_python_tasks(out)._asdict()
    files["pretraining"] = out / "pretraining.jsonl"
    docs.write_package_docs(files["pretraining"], package or ())
    _print_sizes(files, "documents")


def _print_sizes(files: dict[str, Path], unit: str) -> None:
    for name, path in files.items():
        with path.open(encoding="utf-8") as stream:
            stdout.print(f"{path}: {sum(1 for _ in stream):,} {unit}, {name}")
