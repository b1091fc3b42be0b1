"""Compares what is loaded with libraries that are not Paceline, once; results are kept.

twin.py       tiny twins: same class and settings, random weights, short windows
trial.py      plays a session beside transformers' pass over each whole text
model.py      chooses the sessions, and the faster passes, that agree; keeps results in the cache
tokenizer.py  ids and text beside those of `tokenizers`
"""
