"""Creation of drafts.

layers.py           a subset of the target's layers
subclone.py         narrower layers: the most important channels and heads of the target
scratch.py          a new model and tokenizer; a new, smaller model in the target's architecture
restricted_head.py  a draft that proposes only likely tokens
save.py             saves a draft with the target's tokenizer files
"""
