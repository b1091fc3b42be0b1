"""C implementations of inner loops, compiled on first use; PyTorch is the fallback.

structures.py  structures shared with C
library.py     compiles the sources into one library and checks it
self_check.py  compares a library with PyTorch
kernels.py     sampling (sampling.c), the lossless rule (speculation.c), losses (divergences.c);
               registers them as a backend of core

transformer.c (products.c, tiles.c) runs Llama-like models on a few tokens; speculation.c drafts and
verifies with them. Both are called by models/llama.
"""

from paceline.native.library import compiled

__all__ = ["compiled"]
