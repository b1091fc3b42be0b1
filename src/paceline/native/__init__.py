"""Inner loops in C, compiled on first use; every caller has a PyTorch fallback.

compilation.py    the sources, compiled into one library for this machine
sampling.py       probabilities, and tokens drawn from them (sampling.c)
verification.py   blocks judged (verification.c) by any built-in rule (rules.c)
self_check.py     what a library must compute right before it is used
llama.py          a Llama-like model in memory: llama.c reads a few tokens through it (products.c), and
                  it draws ahead or judges what was drawn (speculation.c); see models/native_llama.py
"""

from paceline.native.compilation import compiled

__all__ = ["compiled"]
