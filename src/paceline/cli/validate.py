"""`paceline validate`: is this configuration right? Prints it resolved, runs nothing."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.config import StrictModel


class Kind(StrEnum):
    """Commands that read a configuration."""

    draft = "draft"
    pretrain = "pretrain"
    generate_data = "generate-data"
    align = "align"
    sweep = "sweep"
    trajectory = "trajectory"
    analyze = "analyze"
    measure = "measure"
    verify = "verify"
    bench = "bench"
    tune = "tune"


def validate(
    kind: Annotated[Kind, typer.Argument(help="The command that the file is for.")],
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    overrides: options.Overrides = None,
) -> None:
    """Check a configuration file and print it with every default filled in."""
    from paceline.config import to_yaml

    typer.echo(to_yaml(options.build(schema_of(kind), config, overrides)), nl=False)


def schema_of(kind: Kind) -> type[StrictModel]:
    """What a configuration of this kind may hold."""
    from paceline.bench import BenchConfig
    from paceline.bench.tune import TuneConfig
    from paceline.data.requests import GenerateDataConfig
    from paceline.measure import MeasureConfig, VerifyConfig
    from paceline.measure.frontier import AnalyzeConfig
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.train import AlignConfig, PretrainConfig
    from paceline.train.drafts import DraftConfig
    from paceline.train.sweep import SweepConfig

    return {
        Kind.draft: DraftConfig,
        Kind.pretrain: PretrainConfig,
        Kind.generate_data: GenerateDataConfig,
        Kind.align: AlignConfig,
        Kind.sweep: SweepConfig,
        Kind.trajectory: TrajectoryConfig,
        Kind.measure: MeasureConfig,
        Kind.analyze: AnalyzeConfig,
        Kind.verify: VerifyConfig,
        Kind.bench: BenchConfig,
        Kind.tune: TuneConfig,
    }[kind]
