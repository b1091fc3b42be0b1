"""Models: loading, inference sessions for decoding, and construction of drafts.

contract.py       interfaces that decoding and training use
hf/               implementation for any transformers model
llama/            faster implementation for Llama-like models
prepare.py        chooses the implementation of a model's forward pass
precision.py      measures which dtype is fastest on this machine
loading.py        hub id, local directory or GGUF file -> HfModel
gguf.py           converts a GGUF file to a model directory in the cache
inspection.py     facts about a model that do not need its weights
compatibility.py  checks that target and draft share a vocabulary
drafts/           builds drafts from a target or from scratch
fakes.py          table models for tests
"""

from paceline.models.hf.base import HfModel
from paceline.models.hf.causal import CausalModel
from paceline.models.loading import load_model
from paceline.models.prepare import prepare_for_decoding
from paceline.models.wrapping import wrap_model
from paceline.native.kernels import use_native_backend

use_native_backend()

__all__ = ["CausalModel", "HfModel", "load_model", "prepare_for_decoding", "wrap_model"]
