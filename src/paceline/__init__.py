"""Paceline: measure, align, decode and export draft models for speculative decoding.

The public names are imported on first use: importing this package does not load torch.
`paceline.measure`, `paceline.export` and `paceline.bench` are packages, so their functions are
`measure_draft`, `export_draft` and `run_bench` here.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from paceline.processor import limit_libraries
from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline import bench as bench
    from paceline import core as core
    from paceline import decode as decode
    from paceline import export as export
    from paceline import measure as measure
    from paceline import models as models
    from paceline import results as results
    from paceline import train as train
    from paceline import view as view
    from paceline.bench import BenchConfig as BenchConfig
    from paceline.bench import run_bench as run_bench
    from paceline.bench.tune import TuneConfig as TuneConfig
    from paceline.bench.tune import tune as tune
    from paceline.core.rules import BiLDRule as BiLDRule
    from paceline.core.rules import Chow as Chow
    from paceline.core.rules import ChowLog as ChowLog
    from paceline.core.rules import Diff as Diff
    from paceline.core.rules import DiffLog as DiffLog
    from paceline.core.rules import Lenient as Lenient
    from paceline.core.rules import Lossless as Lossless
    from paceline.core.rules import Lossy as Lossy
    from paceline.core.rules import Opt as Opt
    from paceline.core.rules import OptLog as OptLog
    from paceline.core.rules import TokenV1 as TokenV1
    from paceline.core.rules import TokenV2 as TokenV2
    from paceline.core.rules import TokenV3 as TokenV3
    from paceline.core.sampling import SamplingParams as SamplingParams
    from paceline.core.stats import DecodeStats as DecodeStats
    from paceline.decode import Adaptive as Adaptive
    from paceline.decode import AutoregressiveDecoder as AutoregressiveDecoder
    from paceline.decode import BigLittleDecoder as BigLittleDecoder
    from paceline.decode import Block as Block
    from paceline.decode import Confident as Confident
    from paceline.decode import FixedLength as FixedLength
    from paceline.decode import Generation as Generation
    from paceline.decode import OracleCascade as OracleCascade
    from paceline.decode import Piece as Piece
    from paceline.decode import SequenceCascade as SequenceCascade
    from paceline.decode import SpeculativeDecoder as SpeculativeDecoder
    from paceline.decode import TextGeneration as TextGeneration
    from paceline.decode import TokenCascade as TokenCascade
    from paceline.decode.strategies import DecodingConfig as DecodingConfig
    from paceline.decode.strategies import build_decoder as build_decoder
    from paceline.export import ExportConfig as ExportConfig
    from paceline.export import Exported as Exported
    from paceline.export import export_draft as export_draft
    from paceline.measure import DraftComparison as DraftComparison
    from paceline.measure import LosslessnessReport as LosslessnessReport
    from paceline.measure import MeasureConfig as MeasureConfig
    from paceline.measure import Measurement as Measurement
    from paceline.measure import VerifyConfig as VerifyConfig
    from paceline.measure import measure_draft as measure_draft
    from paceline.measure import measure_drafts as measure_drafts
    from paceline.measure import verify_losslessness as verify_losslessness
    from paceline.measure.analysis import AnalyzeConfig as AnalyzeConfig
    from paceline.measure.analysis import analyze as analyze
    from paceline.models import load as load
    from paceline.models import load_model as load_model
    from paceline.models import prepare_for_decoding as prepare_for_decoding
    from paceline.models import wrap_model as wrap_model
    from paceline.results import load_rows as load_rows
    from paceline.train import AlignConfig as AlignConfig
    from paceline.train import PretrainConfig as PretrainConfig
    from paceline.train import align as align
    from paceline.train import pretrain as pretrain
    from paceline.view import write_report as write_report

limit_libraries()

_NAMES = {
    "bench": "BenchConfig run_bench",
    "bench.tune": "TuneConfig tune",
    "core.rules": (
        "BiLDRule Chow ChowLog Diff DiffLog Lenient Lossless Lossy Opt OptLog TokenV1 "
        "TokenV2 TokenV3"
    ),
    "core.sampling": "SamplingParams",
    "core.stats": "DecodeStats",
    "decode": (
        "Adaptive AutoregressiveDecoder BigLittleDecoder Block Confident FixedLength "
        "Generation OracleCascade Piece SequenceCascade SpeculativeDecoder TextGeneration "
        "TokenCascade"
    ),
    "decode.strategies": "DecodingConfig build_decoder",
    "export": "ExportConfig Exported export_draft",
    "measure": (
        "DraftComparison LosslessnessReport MeasureConfig Measurement VerifyConfig measure_draft "
        "measure_drafts verify_losslessness"
    ),
    "measure.analysis": "AnalyzeConfig analyze",
    "models": "load load_model prepare_for_decoding wrap_model",
    "results": "load_rows",
    "train": "AlignConfig PretrainConfig align pretrain",
    "view": "write_report",
}
"""What each module offers here; a test compares it with the imports above."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = {module.partition(".")[0] for module in _NAMES}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - it reads the imports


if not TYPE_CHECKING:  # a type checker would take any name to be here

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"paceline.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        return getattr(importlib.import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*filter(re.compile("__").match, globals()), *_HOMES, *_PACKAGES, "errors"})
