"""Passes over few tokens that are compiled and recorded as CUDA graphs, for decoder-only models.

attention.py: attention over buffers of fixed size. fixed_cache.py: the buffers. fixed_pass.py: the
forward pass of transformers over them. compiling.py: compiled modules. recorder.py: CUDA graphs.
session.py: sessions.
"""
