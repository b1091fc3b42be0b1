"""The interfaces of models/contract.py for any transformers model.

architectures.py     architectures that cannot roll back, and context lengths
base.py              base class of models
cache.py             key-value cache with preallocated buffers
masks.py             masks and positions of rows that differ in length
session.py           sessions of decoder-only models
causal.py            decoder-only models: forward pass, hidden states for training
seq2seq_cache.py     cache of an encoder-decoder: decoder tokens and encoded sources
seq2seq_session.py   sessions of encoder-decoders
seq2seq.py           encoder-decoders: forward pass, hidden states for training
agreement.py         compares the logits of a faster pass with transformers
plain_text.py        texts and logits by transformers alone
rollback.py          checks that a model can roll back its cache
wrapping.py          transformers model -> HfModel
draft_vocabulary.py  the file that lists the tokens a draft may propose
"""
