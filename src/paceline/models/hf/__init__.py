"""The interfaces of models/contract.py for any transformers model.

architectures.py     what a configuration says: context lengths, layers, decoder prompts
settings.py          settings of generation_config.json
draft_vocabulary.py  the file that lists the tokens a draft may propose
text_part.py         what reads text in a model of images or audio and text
spreading.py         models that are larger than one GPU
logit_map.py         how a model makes logits from hidden states
base.py              base class of models
cache.py             key-value cache with preallocated buffers; masks and positions of its rows
row_session.py       one session per row; models that cannot roll back
causal.py            decoder-only models: forward pass, sessions, hidden states for training
seq2seq.py           the same for encoder-decoders
plain_text.py        texts and logits by transformers alone
"""
