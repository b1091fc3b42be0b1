"""The interfaces of models/contract.py for any transformers model.

architectures.py     what a configuration says: context lengths, layers, decoder prompts
settings.py          settings of generation_config.json
base.py              base class of models
cache.py             key-value cache with preallocated buffers
masks.py             masks and positions of rows that differ in length
positions.py         learned positions of decoders that take none
session.py           sessions of decoder-only models
row_session.py       one session per row; models that cannot roll back
causal.py            decoder-only models: forward pass, hidden states for training
seq2seq_cache.py     cache of an encoder-decoder: decoder tokens and encoded sources
seq2seq_session.py   sessions of encoder-decoders
seq2seq.py           encoder-decoders: forward pass, hidden states for training
plain_text.py        texts and logits by transformers alone
draft_vocabulary.py  the file that lists the tokens a draft may propose
"""
