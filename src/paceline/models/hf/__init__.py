"""The interfaces of models/contract.py for any transformers model.

architectures.py     architectures that cannot roll back, and context lengths
base.py              base class of models
cache.py             key-value cache with preallocated buffers
session.py           sessions of decoder-only models
agreement.py         compares the logits of a faster pass with transformers
rollback.py          checks that a model can roll back its cache
causal.py            decoder-only models: sessions for decoding, hidden states for training
draft_vocabulary.py  the file that lists the tokens a draft may propose
"""
