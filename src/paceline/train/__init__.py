"""Training drafts.

align.py        align(AlignConfig) -> run directory: a draft towards its target
pretrain.py     pretrain(PretrainConfig) -> run directory: a model towards the next token
run.py          what both have in common: before, training, after
align_config.py  AlignConfig: everything that align can be told
settings.py     what every kind of training is told: budget, steps, optimiser, checkpoints
training_text.py  the text that align trains on and is judged by
recipes.py      named recipes as defaults
objectives.py   divergences and their weighted sums, as configuration
optim.py        optimisers and schedules, as configuration and as torch objects
adafactor.py    Adafactor with the floor of its paper
coverage.py     what a draft of few tokens is held against: the target over its whole vocabulary
step.py         one optimiser step: target's scores, draft's loss, accumulation, processes
loop.py         steps until a budget is spent; metrics, evaluation, checkpoints
freezing.py     parts of a draft that stay
guard.py        losses that make no sense, and requests to stop
checkpoint.py   whole checkpoints, and runs that go on
evaluation.py   agreement with the target on held-out text
"""

from paceline.train.align import align
from paceline.train.align_config import AlignConfig
from paceline.train.pretrain import PretrainConfig, pretrain

__all__ = ["AlignConfig", "PretrainConfig", "align", "pretrain"]
