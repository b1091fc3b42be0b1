"""`paceline demo`: the whole story on one real model."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import stdout


def demo(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    out: Annotated[Path, typer.Option(help="Where results and the draft stay.")] = Path(
        "runs/demo"
    ),
    config: options.ConfigFile = Path("configs/align/demo.yaml"),
    minutes: Annotated[float, typer.Option(help="Time for the alignment.")] = 6.0,
    layers: Annotated[str, typer.Option(help="Layers of the target to draft with.")] = "0,1,2,29",
    dry_run: options.DryRun = False,
) -> None:
    """Make, align, verify and time a draft of one model.

    Continues where an earlier run stopped.

    Exit code 0 where the draft surely pays at temperature 0 or 1 and the text stays the target's.
    """
    from paceline.cli.demo_story import Story, before_and_after
    from paceline.cli.draft import parse_layers
    from paceline.cli.preflight import check_demo

    story = Story(target, out, layers=parse_layers(layers))
    wanted = story.plan(config or Path("configs/align/demo.yaml"), minutes)  # a mistake is said now
    check_demo(target, out, parse_layers(layers), dry_run=dry_run)
    story.prepare()
    # Few texts show a draft that is far from its target; a narrow interval at the end needs many.
    before = [story.measure("before", story.start, t, prompts=32, timed=8) for t in (1.0, 0.0)]
    story.align(wanted)
    after = [story.measure("after", story.aligned, t, prompts=64, timed=64) for t in (1.0, 0.0)]
    gamma = after[0].best_gamma or 1
    report = story.verify(gamma)
    story.decode(gamma)
    stdout.print(before_and_after(before, after))
    stdout.print(f"The aligned draft is {story.aligned}; every figure above is in {out}.")
    pays = any(found.verdict.go for found in after)
    raise typer.Exit(0 if pays and report.passed else 1)
