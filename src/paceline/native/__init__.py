"""The inner loops in C, compiled on first use; who calls them has a way in torch as well.

compilation.py    the sources made into one library on this machine, once
verification.py   draw tokens, judge lossless blocks (verification.c)
llama.c           a few tokens through a Llama-like model; its caller is models/native_llama.py
"""

from paceline.native.compilation import compiled

__all__ = ["compiled"]
