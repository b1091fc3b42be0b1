"""Any transformers model behind the contract of models/contract.py.

architectures.py     what a configuration tells: who cannot roll back, and how long texts may get
base.py              what all models of transformers have in common
cache.py             keys and values, right-aligned, with room to grow
session.py           the texts that a decoder-only model has read
agreement.py         does a faster way to read give what transformers gives?
rollback.py          proof that a model can forget its last tokens
causal.py            decoder-only models: sessions to decode, hidden states to train
draft_vocabulary.py  the file that lists the tokens which a draft may propose
"""
