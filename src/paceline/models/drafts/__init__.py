"""Creation of drafts.

layers.py           a subset of the target's layers
subclone.py         narrower layers: the most important channels and heads of the target
subclone_t5.py      the same for T5-like models
importance.py       measures which channels and heads matter
answers.py          answers of an encoder-decoder, to measure on
derive.py           a new, smaller model in the target's architecture
heads.py            heads of new encoder-decoders
scratch.py          a new model and tokenizer
scratch_t5.py       a new T5
restricted_head.py  a draft that proposes only likely tokens
save.py             saves a draft with the target's tokenizer files
"""
