"""C implementations of inner loops, from paceline-kernels or compiled on first use; else PyTorch.

structures.py  structures of the C headers
library.py     loads the library of paceline-kernels, or compiles the sources
kernels.py     sampling (sampling.c), the lossless rule (speculation.c), losses (divergences.c);
               registers them as a backend of core

transformer.c (products.c, tiles.c) runs Llama-like models on a few tokens; speculation.c drafts and
verifies with them. Both are called by models/llama.
"""

from paceline.native.library import compiled, library_in_use

__all__ = ["compiled", "library_in_use"]
