"""`paceline demo`: create, align, measure and verify a draft of one model."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import stdout


def demo(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("runs/demo"),
    config: options.ConfigFile = Path("configs/align/demo.yaml"),
    minutes: Annotated[float, typer.Option(help="Training time of the alignment.")] = 6.0,
    layers: Annotated[str, typer.Option(help="Target layers to keep in the draft.")] = "0,1,2,29",
    dry_run: options.DryRun = False,
) -> None:
    """Create, align, measure and verify a draft.

    Resumes an earlier run in the same directory. Exit code 0: decoding is lossless, and the verdict
    at temperature 0 or 1 is GO; 1: it is NO-GO at both, or a test failed; 3: no verdict.
    """
    from paceline.cli.demo_story import Story, before_and_after
    from paceline.cli.draft import parse_layers
    from paceline.cli.preflight import check_demo

    kept = parse_layers("--layers", layers)
    story = Story(target, out, layers=kept)
    wanted = story.plan(config or Path("configs/align/demo.yaml"), minutes)  # fail early
    check_demo(target, out, kept, dry_run=dry_run)
    story.prepare()
    # A weak draft shows on few texts; the final figures need narrow intervals.
    before = [story.measure("before", story.start, t, prompts=32, timed=8) for t in (1.0, 0.0)]
    story.align(wanted)
    after = [story.measure("after", story.aligned, t, prompts=64, timed=64) for t in (1.0, 0.0)]
    gamma = after[0].best_gamma or 1
    report = story.verify(gamma)
    story.decode(gamma)
    stdout.print(before_and_after(before, after))
    stdout.print(f"The aligned draft is in {story.aligned}, all figures are in {out}.")
    verdict = best_code([found.verdict.exit_code for found in after])
    raise typer.Exit(verdict if report.passed else 1)


def best_code(codes: list[int]) -> int:
    """0 if any verdict is GO, 1 if all are NO-GO, else 3."""
    return 0 if 0 in codes else max(codes)
