"""Texts that tell tokenizers apart, and their tokens by libraries other than transformers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
PROBES = (
    *("2024", "a 1234567890", "3.14, 1,000,000 and 007; x1y22z333 ²½"),
    *(" a", "a ", "a  b   c    d     e", "\ta\t\tb", "   ", "a\u200bb\u00a0c\u3000d"),
    *("a\nb\n\nc\n\n\nd", "a\r\nb \n c", " \n  \n", "a\n    b\n        c"),
    "def f(x):\n    return x**2 + 1  # note\n\n\nclass A: pass",
    "if(a!=b){c->d[0]+=1;} http://a.b/c?d=e&f=%20 snake_case HTTPServer",
    *(
        "don't DON'T I'm we'll they've it's he'd you're",
        "don\u2019t “quotes” \u2013 … €5",
        "...!!!???---",
    ),
    *("東京は晴れ。中文字符\uff0c한국어", "สวัสดี हिन्दी مرحبا привет Ωμέγα", "Größe naïve ÅÉ"),
    *(
        "e\u0301 n\u0303 A\u030a",
        "ﬁ \uff46\uff55\uff4c\uff4c Ⅳ ㌔ \u212b",
        "🎉\U0001f469\u200d\U0001f469\u200d\U0001f467🇫🇷👍🏽",
        "a" * 20,
    ),
    "<s>[INST] <|im_start|>user\n<|endoftext|></s><pad><unk>[MASK] ▁a ▁▁ Ġa <0x0A>",
    "The quick brown fox jumps over the lazy dog, and ALL of it in Mixed Case.",
    "",
)
"""Digits, spaces, line breaks, code, contractions, scripts, normal forms, emoji, special tokens."""

_MOST_ADDED = 2000  # tokens that are probed one by one
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SENTENCEPIECE += ("sentencepiece.model", "source.spm")


class Reading(NamedTuple):
    """What a library makes of a text; `text` is that of its tokens, None if it is not compared."""

    tokens: list[Any]
    text: str | None


class Reference(Protocol):
    """A library that reads the tokenizer's files by itself.

    Attributes:
        source: The file that it reads.
    """

    source: str

    def probes(self, tokenizer: Any) -> list[str]:
        """Texts that both read."""
        ...

    def reads(self, text: str) -> Reading: ...

    def read_by(self, tokenizer: Any, text: str) -> Reading:
        """The same with a tokenizer of transformers."""
        ...


class TokenizerFile:
    """The library `tokenizers` on tokenizer.json."""

    source = TOKENIZER_FILE

    def __init__(self, path: Path) -> None:
        self.plain = Tokenizer.from_file(str(path))
        self.plain.no_truncation()
        self.plain.no_padding()

    def probes(self, tokenizer: Any) -> list[str]:
        added = [token.content for token in self.plain.get_added_tokens_decoder().values()]
        step = len(added) // _MOST_ADDED + 1
        texts = [*PROBES, *(f"a{token}b {token} c" for token in added[::step])]
        # tokens that only tokenizer_config.json adds are plain characters here
        others = tokenizer.get_added_vocab().keys() - set(added)
        return [text for text in texts if not any(token in text for token in others)]

    def reads(self, text: str) -> Reading:
        ids = self.plain.encode(text, add_special_tokens=False).ids
        return Reading(ids, self.plain.decode(ids, skip_special_tokens=False))

    def read_by(self, tokenizer: Any, text: str) -> Reading:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Reading(ids, tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class SentencePieceFile:
    """The library `sentencepiece` on its model file; the tokens are pieces, not ids.

    transformers numbers the pieces of some models anew, and adds special tokens.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.source = path.name
        self._model: Any = SentencePieceProcessor(model_file=str(path))

    def probes(self, tokenizer: Any) -> list[str]:
        # sentencepiece reads a control token in a text as plain characters
        special = [*map(str, tokenizer.get_added_vocab()), *tokenizer.all_special_tokens]
        return [text for text in PROBES if not any(token in text for token in special)]

    def reads(self, text: str) -> Reading:
        found = self._model.encode(text, out_type=str)
        known = {piece for piece in found if not self._model.is_unknown(self._model[piece])}
        return Reading(_unknown_once(found, known), None)

    def read_by(self, tokenizer: Any, text: str) -> Reading:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found = tokenizer.convert_ids_to_tokens(ids)
        return Reading(_unknown_once(found, {*found} - {tokenizer.unk_token}), None)


def find_reference(directory: Path) -> Reference | None:
    """The reference for the files of a tokenizer; None if no library reads them.

    Raises:
        Exception: tokenizer.json cannot be read.
    """
    path = directory / TOKENIZER_FILE
    if path.exists():
        return TokenizerFile(path)
    for name in _SENTENCEPIECE:
        if (directory / name).exists():
            with contextlib.suppress(Exception):  # another format of this name, such as tiktoken's
                return SentencePieceFile(directory / name)
    return None


def _unknown_once(pieces: Sequence[str], known: set[str]) -> list[str | None]:
    """Pieces, with None for each run of unknown ones."""
    found: list[str | None] = []
    for piece in pieces:
        if piece in known:
            found.append(piece)
        elif found[-1:] != [None]:
            found.append(None)
    return found
