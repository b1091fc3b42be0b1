"""Passes over few tokens that are compiled and recorded as CUDA graphs, for any decoder-only model.

attention.py: attention over buffers of fixed size. fixed_cache.py: the buffers. fixed_pass.py: the
forward pass of transformers over them, compiled. recorder.py: CUDA graphs. session.py: sessions.
"""
