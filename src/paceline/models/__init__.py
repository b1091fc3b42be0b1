"""Models behind one seam: load them, wrap them, read texts with them, cut drafts out of them.

session.py        the contract of decoding with models (ModelSession, Model)
causal.py         any decoder-only transformers model behind it
causal_session.py the texts that such a model has read
cache.py          keys and values, right-aligned, with room to grow
architectures.py  who cannot roll back is refused by name, the unknown have to prove it
loading.py        hub id, local directory or GGUF file -> CausalModel
gguf.py           a GGUF file becomes a model directory in the cache, once
vocabulary.py     may these two models speculate together?
draft.py          a draft from some of the target's layers; save it as an ordinary directory
subcloning.py     a narrower one, of the parts that matter most
derived.py        a new one in the target's architecture
kernels.py        16-bit weights for CPUs that have no 16-bit arithmetic
llama.py          Llama-like models on them, in as few calls as possible
native_llama.py   and few tokens of them in one call, by native/llama.c
int8.py           8-bit weights for drafts
fakes.py          table models for tests
"""

from paceline.models.causal import CausalModel, wrap_model
from paceline.models.loading import load_model
from paceline.native.backend import use_native_backend

use_native_backend()

__all__ = ["CausalModel", "load_model", "wrap_model"]
