"""Training drafts.

align.py        align(AlignConfig) -> run directory: set-up, before and after
config.py       AlignConfig: everything it can be told
recipes.py      named recipes as defaults
objectives.py   divergences and their weighted sums, as configuration
optim.py        optimisers and schedules, as configuration and as torch objects
step.py         one optimiser step: target's scores, draft's loss, accumulation, processes
loop.py         steps until a budget is spent; metrics, evaluation, checkpoints
guard.py        losses that make no sense, and requests to stop
checkpoint.py   whole checkpoints, and runs that go on
evaluation.py   agreement with the target on held-out text
"""

from paceline.train.align import align
from paceline.train.config import AlignConfig

__all__ = ["AlignConfig", "align"]
