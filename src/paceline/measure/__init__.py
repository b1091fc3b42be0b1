"""Measures whether a draft is worth serving, and tests that the output is lossless.

- `measurement`, `measure_config`: the `measure` command and its configuration
- `acceptance`, `analysis`: teacher-forced scoring of text by both models; effect of each rule
- `latency`, `timing`: timing of forward passes; paired timing of requests, choice of gamma
- `served`, `served_figures`: counters of a serving engine beside the prediction
- `served_runs`, `starts`: starts of the engine in turn; variation between starts in intervals
- `agreement`: whether the counters agree with the prediction
- `served_costs`, `engine_costs`: timing of an engine's steps; the file with their costs
- `verdict`: GO, NO-GO or UNDECIDED, with the reason
- `expected_speed`: expected speedups of all gammas, with intervals
- `perplexity`: how well one model predicts plain text
- `losslessness`: tests of greedy and sampled speculative text against the target
"""

from paceline.measure.losslessness import LosslessnessReport, VerifyConfig, verify_losslessness
from paceline.measure.measurement import MeasureConfig, Measurement, measure

__all__ = [
    "LosslessnessReport",
    "MeasureConfig",
    "Measurement",
    "VerifyConfig",
    "measure",
    "verify_losslessness",
]
