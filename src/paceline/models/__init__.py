"""Models: loading, inference sessions for decoding, and construction of drafts.

contract.py          interfaces that decoding and training use
hf/                  implementation for any transformers model
llama/, t5.py        faster implementations for Llama-like and T5-like models
prepare.py           chooses the implementation of a model's forward pass
precision.py         which dtype "auto" is on this machine
loading.py           hub id, local directory, GGUF file or adapter -> HfModel
checkpoint_files.py  checks of a model's files
gguf/                converts a GGUF file to a model directory in the cache
admission/           compares what was loaded with libraries that are not Paceline
inspection.py        facts about a model that do not need its weights
compatibility.py     checks that target and draft share a vocabulary
token_text.py        the tokens of prompts, and the text of new tokens
chat_text.py         messages of chats -> the text of a prompt, by the tokenizer's template
drafts/              builds drafts from a target or from scratch
"""

from paceline.core.backend import register
from paceline.models.hf.base import HfModel
from paceline.models.hf.causal import CausalModel
from paceline.models.loading import load_model, wrap_model
from paceline.models.prepare import load, prepare_for_decoding
from paceline.native.kernels import NativeBackend

register(NativeBackend())

__all__ = ["CausalModel", "HfModel", "load", "load_model", "prepare_for_decoding", "wrap_model"]
