"""Fast forward passes for Llama-like models on a CPU.

int8.py           8-bit weights for drafts
cpu_weights.py    copies the weights into the layout of native/transformer.c
cpu.py            the compiled forward pass (native/transformer.c) for few tokens
cpu_session.py    sessions that use the compiled pass and serve whole blocks
"""
