"""Training of draft models.

align.py                   align(AlignConfig): distill the target into a draft
pretrain.py                pretrain(PretrainConfig): next-token training of a model
run.py                     run directory, precision and result, shared by align and pretrain
align_config.py            AlignConfig
chunk_size.py              number of tokens whose logits are in memory at the same time
settings.py                TrainSettings: budget, batches, optimizer, checkpoints
recipes.py                 named recipes as defaults
training_text.py           training and held-out text of align
objectives.py              divergences and weighted sums of divergences
reward_moments.py          token draws and reward moments of TVD++
coverage.py                target scores for drafts with a restricted vocabulary
vocabulary_subset_loss.py  divergences over a part of the vocabulary
optim.py, adafactor.py     optimizers and learning-rate schedules
step.py, loop.py           one optimizer step; the training loop
sharding.py                weights sharded over processes (FSDP)
tied_embeddings.py         sparse gradients of tied embeddings
freezing.py                frozen parts of a draft
guard.py                   divergence checks and stop signals
checkpoint.py              checkpoints and resuming
evaluation.py              agreement with the target on held-out text
initial_draft.py           drafts derived from a target
layer_search.py            search for the target's best layers
sweep.py                   grids of alignment runs
"""

from paceline.train.align import align
from paceline.train.align_config import AlignConfig
from paceline.train.pretrain import PretrainConfig, pretrain

__all__ = ["AlignConfig", "PretrainConfig", "align", "pretrain"]
