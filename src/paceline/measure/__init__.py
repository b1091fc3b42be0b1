"""Is this draft worth serving, and is the output still the target's?

- `config`: everything that `measure` can be told
- `measurement`: the one command: texts, acceptance, cost, prediction, paired timing, verdict
- `acceptance`: both models over target-sampled text, teacher-forced
- `latency`, `timing`: seconds of a pass; paired timing of whole requests, and the fastest gamma
- `served`, `served_figures`: an engine's own counters beside the prediction
- `served_costs`, `engine_costs`: timing an engine's steps; the file of their costs
- `verdict`: GO or NO-GO, with the reason in a sentence
- `losslessness`: the proof that speculation leaves the target's text alone
"""

from paceline.measure.losslessness import (
    LosslessnessReport,
    VerifyConfig,
    verify_losslessness,
)
from paceline.measure.measure_config import MeasureConfig
from paceline.measure.measurement import Measurement, measure

__all__ = [
    "LosslessnessReport",
    "MeasureConfig",
    "Measurement",
    "VerifyConfig",
    "measure",
    "verify_losslessness",
]
