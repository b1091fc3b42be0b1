"""Chooses for how many tokens logits are in memory at the same time.

Small chunks leave a GPU waiting for kernels to start: with a target of 1B parameters, 256 tokens
gave 37,100 tokens/s where 8,192 gave 60,900, with 4.4 and 22 GiB (H200). On two cores of an AMD
EPYC (avx512_bf16), 1,024 and 2,048 gave medians of 1.05 to 1.10 times the speed of 256 over ten
rounds in turns, each between 0.86 and 1.5, so CPUs keep 256.

Memory of a chunk: a term of the objective needs at most 12 float32 numbers for each token and entry
of the vocabulary. They are logits and log-probabilities of both models, and what autograd keeps and
makes of them (forward KL 22 bytes, JSD 40, a rule 48). The tests count them. So

    tokens = share of free memory / (48 bytes * terms * entries), from 256 to 8,192

Half of the free memory is used. The rest is for texts that are longer than those of the first step.
Free is what the device and PyTorch's cache have left when the first loss is computed, without the
gradients and moments that the first update will add.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SMALLEST, _LARGEST = 256, 8192
_ENTRY_BYTES = 48  # per token, vocabulary entry and term
_SHARE = 0.5  # of free memory
_UPDATE_BYTES = 12  # per trained weight: gradient and two moments


class ChunkSize:
    """The number of tokens per chunk; `auto` is chosen at the first loss, and at a larger one.

    Attributes:
        current: The number in use.
    """

    def __init__(self, configured: int | Literal["auto"]) -> None:
        self._is_open = configured == "auto"
        self._most = 0  # entries times terms of a loss
        self.current = SMALLEST if configured == "auto" else configured

    def choose(self, model: nn.Module, num_entries: int, num_terms: int) -> int:
        """The number for a loss of the trained model with this many terms over these entries."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        size = num_entries * num_terms
        if self._is_open and weights[0].device.type == "cuda" and size > self._most:
            self._most = size
            tokens = int(_SHARE * _free_bytes(weights) / (_ENTRY_BYTES * size))
            self.current = max(SMALLEST, min(_LARGEST, tokens // SMALLEST * SMALLEST))
        return self.current


def _free_bytes(trained: Sequence[Tensor]) -> float:
    """Memory that is left for this process behind its first update."""
    device = trained[0].device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    update = _UPDATE_BYTES * sum(map(_num_local, trained))
    return free / _processes_per_device() + cached - update


def _num_local(weight: Tensor) -> int:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).numel()


def _processes_per_device() -> int:
    """Processes of this run on one device; they choose at the same time."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun and accelerate
    return -(-here // max(1, torch.cuda.device_count()))
