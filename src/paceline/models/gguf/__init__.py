"""Reads GGUF files: converts each to a model directory in the cache, once.

conversion.py     the conversion; keys and tensors without it
architectures.py  configurations, by llama.cpp's name of an architecture
vocabulary.py     tokenizers, the roles of their tokens, llama.cpp's pre-tokenizers by name
fields.py         keys and tensors, with a record of those that were read
"""
