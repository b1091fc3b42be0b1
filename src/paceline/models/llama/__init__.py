"""Fast forward passes for Llama-like models on a CPU.

cpu_weights.py    the weights in the layout of native/transformer.c; 8-bit weights of drafts
cpu.py            the compiled forward pass (native/transformer.c) for few tokens, and sessions
                  that use it and serve whole blocks
"""
