"""Measures whether a draft is worth serving, and tests that the output is lossless.

pair.py         loads target, draft and prompts; samples texts
acceptance.py   teacher-forced scores of texts by both models
latency.py      times passes and requests; chooses the number of drafted tokens per block
engine_costs.py times an engine's steps; the file with their costs
measurement.py  the `measure` command: acceptance, cost, speedup; drafts compared in pairs
verdict.py      expected speedups; GO, NO-GO or UNDECIDED, with the reason
agreement.py    an engine's counters and their prediction; whether they agree
served.py       `measure --engine`: counters of an engine beside the prediction
analysis.py     quality and speedup of rules, predicted from the same scores
trajectory.py   checkpoints of training runs on the same texts
perplexity.py   how well one model predicts plain text
losslessness.py tests of greedy and sampled speculative text against the target
results.py      figures of a measurement by name, from its rows
slices.py       figures and verdicts by columns of the prompts; acceptance by place
speculators.py  methods of vLLM side by side, at several numbers of requests
"""

from paceline.measure.losslessness import LosslessnessReport, VerifyConfig, verify_losslessness
from paceline.measure.measurement import (
    DraftComparison,
    MeasureConfig,
    Measurement,
    measure,
    measure_drafts,
)

measure_draft = measure  # for `paceline`, where `measure` is this package

__all__ = [
    "DraftComparison",
    "LosslessnessReport",
    "MeasureConfig",
    "Measurement",
    "VerifyConfig",
    "measure",
    "measure_draft",
    "measure_drafts",
    "verify_losslessness",
]
