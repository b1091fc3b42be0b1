"""Drafts made from a target.

layers.py       some of its layers
subclone.py     the same, narrower: the parts that matter most
derive.py       a new model in its architecture
scratch.py      a new model and tokenizer from nothing
restricted_head.py  a draft that proposes only likely tokens
save.py         an ordinary model directory with the target's tokenizer files
"""
