"""Training of draft models.

align.py          align(AlignConfig): distill the target into a draft, and its text
pretrain.py       pretrain(PretrainConfig): next-token training of a model
config.py         AlignConfig, and the settings of all kinds of training
run.py            an open run: directory, processes, precision
evaluation.py     agreement with the target on held-out text
loop.py           the training loop; divergence checks and stop signals
step.py           one optimizer step; trained and frozen weights
loss.py           the loss of a part of a step, in chunks of tokens
objectives.py     divergences, TVD++, and weighted sums of them
optim.py          optimizers and learning-rate schedules
checkpoint.py     checkpoints and resuming
initial_draft.py  drafts derived from a target
lora.py           adapters of low rank in place of a draft's weights
parallel.py       masks behind anchors of a text, for drafts that propose a block in one pass
tracking.py       metrics for experiment trackers
"""

from paceline.train.align import align
from paceline.train.config import AlignConfig
from paceline.train.pretrain import PretrainConfig, pretrain

__all__ = ["AlignConfig", "PretrainConfig", "align", "pretrain"]
