"""C implementations of inner loops, compiled on first use; PyTorch is the fallback.

structures.py            structures shared with C
compilation.py           compiles the sources into one library
self_check.py            compares a library with PyTorch
checked.py               the library in use
sampling_kernels.py      softmax, top-p and sampling (sampling.c)
verification_kernels.py  verification of blocks (verification.c, rules.c)
divergence_kernels.py    losses and gradients from logits (divergences.c)
rule_form.py             rules in the form of rules.c
backend.py               registers the library as a backend of core

transformer.c (products.c, tiles.c) runs Llama-like models on a few tokens; speculation.c drafts and
verifies with them. Both are called by models/llama.
"""

from paceline.native.checked import compiled

__all__ = ["compiled"]
