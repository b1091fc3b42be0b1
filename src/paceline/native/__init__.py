"""The inner loops in C, compiled on first use; who calls them has a way in torch as well.

compilation.py    the sources made into one library on this machine, once
sampling.py       probabilities, and tokens drawn from them (sampling.c)
verification.py   blocks judged (verification.c) by any rule of the house (rules.c)
self_check.py     what a library must compute right before it is used
llama.py          a Llama-like model in memory: llama.c reads a few tokens through it (products.c), and
                  it draws ahead or judges what was drawn (speculation.c); see models/native_llama.py
"""

from paceline.native.compilation import compiled

__all__ = ["compiled"]
