"""Models behind one contract: load them, wrap them, read texts with them, make drafts of them.

contract.py       what decoding and training ask of a model
hf/               any transformers model
llama/            Llama-like models, faster
prepare.py        which of these reads a model: the only module that knows all of them
precision.py      the numeric type that is fastest here
loading.py        hub id, local directory or GGUF file -> CausalModel
gguf.py           a GGUF file becomes a model directory in the cache, once
inspection.py     what can be known of a model without its weights
compatibility.py  may these two models speculate together?
drafts/           drafts made from a target
fakes.py          table models for tests
"""

from paceline.models.hf.causal import CausalModel, wrap_model
from paceline.models.loading import load_model
from paceline.models.prepare import prepare_for_decoding
from paceline.native.backend import use_native_backend

use_native_backend()

__all__ = ["CausalModel", "load_model", "prepare_for_decoding", "wrap_model"]
