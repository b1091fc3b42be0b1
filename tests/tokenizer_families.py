"""Tiny tokenizers of all families, made with plain `tokenizers`."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = ["def f(x):\n", "    y = x", "    return y", "the cat sat, and 12 don't"] * 9
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _trained(model: Any, pre: Any, decoder: Any, trainer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    tokenizer.train_from_iterator(_TEXTS, trainer)
    found = json.loads(tokenizer.to_str())
    found["added_tokens"] = [
        each for each in found["added_tokens"] if each["content"] not in _BYTES
    ]
    return Tokenizer.from_str(json.dumps(found))


def spaces(scheme: str, strip: int) -> Tokenizer:
    """As Llama 2's, Mistral's or Gemma's: `▁` for spaces, and bytes for unknown characters."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False),
        decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)]),
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<unk>", "<s>", *_BYTES],
            max_token_length=4,
            show_progress=False,
        ),
    )


def byte_level(*, prefix: bool) -> Tokenizer:
    return _trained(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix),
        decoders.ByteLevel(),
        trainers.BpeTrainer(
            vocab_size=300,
            max_token_length=4,
            special_tokens=["<unk>", "<s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )


def unigram() -> Tokenizer:
    return _trained(
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
        ),
    )


def word_piece() -> Tokenizer:
    return _trained(
        models.WordPiece(unk_token="<unk>"),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=False),
        trainers.WordPieceTrainer(
            vocab_size=80, special_tokens=["<unk>", "<s>"], show_progress=False
        ),
    )


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "a space in front of the first word": lambda: spaces("first", 1),
    "a space in front of every part": lambda: spaces("always", 1),
    "no space in front": lambda: spaces("never", 0),
    "bytes": lambda: byte_level(prefix=False),
    "bytes behind a space": lambda: byte_level(prefix=True),
    "unigram": unigram,
    "pieces of words": word_piece,
}


def wrapped(plain: Tokenizer, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", **settings
    )
