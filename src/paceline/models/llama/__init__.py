"""Llama-like models in as few calls as possible: faster than any transformers model is read.

packing.py        16-bit weights for processors that have no 16-bit arithmetic; for any model
int8.py           8-bit weights for drafts
cpu_weights.py    the weights as native/transformer.c reads them
cpu.py            few tokens in one call of it
cpu_session.py    sessions that read few tokens so, and draw and judge whole blocks
forward.py        the whole forward pass in PyTorch
cuda.py           passes of fixed shapes, recorded as CUDA graphs
cuda_session.py   sessions that replay them
"""
