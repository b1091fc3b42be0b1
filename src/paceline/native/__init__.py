"""Inner loops in C, compiled on first use; every caller has a PyTorch fallback.

structures.py     structures and numbers that Python and C share, compared when the library is loaded
compilation.py    the sources, compiled into one library for this machine
self_check.py     what a library must compute right before it is used
checked.py        the library in use, checked once
sampling_kernels.py  probabilities, and tokens drawn from them (sampling.c)
verification_kernels.py  blocks judged (verification.c) by the rules that have a native form (rules.c)
divergence_kernels.py  losses of logits and their slopes (divergences.c)
backend.py        offers all of this to core

transformer.c reads a few tokens through a Llama-like model (products.c), and draws ahead or judges what was
drawn (speculation.c): see models/llama.
"""

from paceline.native.checked import compiled

__all__ = ["compiled"]
