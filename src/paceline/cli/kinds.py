"""Which commands read a configuration, and what each may hold."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

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
    decode = "decode"
    bench = "bench"
    tune = "tune"


def schema_of(kind: Kind) -> type[StrictModel]:
    """What a configuration of this kind may hold."""
    from paceline.bench import BenchConfig
    from paceline.bench.tune import TuneConfig
    from paceline.data.requests import GenerateDataConfig
    from paceline.decode.strategies import DecodingConfig
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
        Kind.decode: DecodingConfig,
        Kind.bench: BenchConfig,
        Kind.tune: TuneConfig,
    }[kind]


def kinds_that_read(keys: Collection[str]) -> list[Kind]:
    """The commands that know all of these keys."""
    return [kind for kind in Kind if set(keys) <= schema_of(kind).model_fields.keys()]
