"""Fast forward passes for Llama-like models on a CPU.

int8.py           8-bit weights for drafts
cpu_weights.py    copies the weights into the layout of native/transformer.c
cpu.py            the compiled forward pass (native/transformer.c) for few tokens, and sessions
                  that use it and serve whole blocks
"""
