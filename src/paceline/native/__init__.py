"""The inner loops in C, compiled on first use; who calls them has a way in torch as well.

compilation.py    the sources made into one library on this machine, once
sampling.py       probabilities, and tokens drawn from them (sampling.c)
verification.py   lossless blocks judged (verification.c)
llama.c           a few tokens through a Llama-like model (products.c); called by models/native_llama.py
speculation.c     such a model draws ahead, or judges what was drawn; called from there, too
"""

from paceline.native.compilation import compiled

__all__ = ["compiled"]
