"""`paceline demo`: the whole story on one real model."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    out: Annotated[Path, typer.Option(help="Where results and the draft stay.")] = Path(
        "runs/demo"
    ),
    minutes: Annotated[float, typer.Option(help="Time for the alignment.")] = 6.0,
    layers: Annotated[str, typer.Option(help="Layers of the target to draft with.")] = "0,1,2,29",
) -> None:
    """Draft, measure, align, measure, verify, decode; resumes where an earlier run stopped."""
    from paceline.demo import run_demo

    run_demo(target, out, minutes=minutes, layers=layers)
