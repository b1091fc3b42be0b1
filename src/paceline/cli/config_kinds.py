"""The commands that read a configuration file, and the schema of each."""

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
    bounds = "bounds"
    measure = "measure"
    measure_engine = "measure-engine"
    verify = "verify"
    decode = "decode"
    perplexity = "perplexity"
    bench = "bench"
    score = "score"
    tune = "tune"
    export = "export"
    study = "study"

    @property
    def command(self) -> str:
        """The command as typed on the command line."""
        return "measure --engine" if self is Kind.measure_engine else str(self)


def schema_of(kind: Kind) -> type[StrictModel]:
    """The configuration class of a command."""
    from paceline.bench import BenchConfig
    from paceline.bench.score import ScoreConfig
    from paceline.bench.tune import TuneConfig
    from paceline.data.requests import GenerateDataConfig
    from paceline.decode.strategies import DecodingConfig
    from paceline.export import ExportConfig
    from paceline.measure import MeasureConfig, VerifyConfig
    from paceline.measure.analysis import AnalyzeConfig
    from paceline.measure.bounds import BoundsConfig
    from paceline.measure.perplexity import PerplexityConfig
    from paceline.measure.served_runs import ServedConfig
    from paceline.measure.trajectory import TrajectoryConfig
    from paceline.studies.study_file import StudyConfig
    from paceline.train import AlignConfig, PretrainConfig
    from paceline.train.initial_draft import DraftConfig
    from paceline.train.sweep import SweepConfig

    return {
        Kind.draft: DraftConfig,
        Kind.pretrain: PretrainConfig,
        Kind.generate_data: GenerateDataConfig,
        Kind.align: AlignConfig,
        Kind.sweep: SweepConfig,
        Kind.trajectory: TrajectoryConfig,
        Kind.measure: MeasureConfig,
        Kind.measure_engine: ServedConfig,
        Kind.analyze: AnalyzeConfig,
        Kind.bounds: BoundsConfig,
        Kind.verify: VerifyConfig,
        Kind.decode: DecodingConfig,
        Kind.perplexity: PerplexityConfig,
        Kind.bench: BenchConfig,
        Kind.score: ScoreConfig,
        Kind.tune: TuneConfig,
        Kind.export: ExportConfig,
        Kind.study: StudyConfig,
    }[kind]


def kinds_that_read(keys: Collection[str]) -> list[Kind]:
    """The commands whose schema has all of these keys."""
    return [kind for kind in Kind if set(keys) <= schema_of(kind).model_fields.keys()]
