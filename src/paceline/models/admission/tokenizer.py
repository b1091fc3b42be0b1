"""Reads texts as tokenizer.json says, whatever class transformers makes of it.

transformers 5 builds the classes of many models anew from vocabulary and merges, and ignores the
normalizer, the pre-tokenizer and the decoder of tokenizer.json. Engines and earlier versions of
transformers read that file, and so does Paceline: where a class gives other tokens, the file is
read without the class, and a warning names a text.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.errors import ModelLoadError, first_line
from paceline.places import TEMPLATES

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.checkpoint_files import ModelLocation

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*")
TOKENIZER_FILES += ("merges.txt", "*.model", "*.spm", "target_vocab.json", "chat_template*")
TOKENIZER_FILES += (TEMPLATES,)
_CLASS_SETTINGS = ("padding_side", "truncation_side", "model_input_names")
_NO_VOCABULARY = (
    "{} has a tokenizer_config.json, but no file with the tokenizer's vocabulary; copy "
    "tokenizer.json, or the files that tokenizer_config.json belongs to, from the original model"
)
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.spm", "*.tiktoken")
TOKENIZER_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
PROBES = (
    *("2024", "a 1234567890", "3.14, 1,000,000 and 007; x1y22z333 ²½"),
    *(" a", "a ", "a  b   c    d     e", "\ta\t\tb", "   ", "a\u200bb\u00a0c\u3000d"),
    "a  1   23    4\t5\n6\n\n  78",
    *("a\nb\n\nc\n\n\nd", "a\r\nb \n c", " \n  \n", "a\n    b\n        c"),
    "def f(x):\n    return x**2 + 1  # note\n\n\nclass A: pass",
    "if(a!=b){c->d[0]+=1;} http://a.b/c?d=e&f=%20 snake_case HTTPServer",
    "don't DON'T I'm we'll they've it's he'd you're",
    *("don\u2019t “quotes” \u2013 … €5", "...!!!???---"),
    *("東京は晴れ。中文字符\uff0c한국어", "สวัสดี हिन्दी مرحبا привет Ωμέγα", "Größe naïve ÅÉ"),
    *("e\u0301 n\u0303 A\u030a", "ﬁ \uff46\uff55\uff4c\uff4c Ⅳ ㌔ \u212b"),
    *("🎉\U0001f469\u200d\U0001f469\u200d\U0001f467🇫🇷👍🏽", "a" * 20),
    "<s>[INST] <|im_start|>user\n<|endoftext|></s><pad><unk>[MASK] ▁a ▁▁ Ġa <0x0A>",
    "The quick brown fox jumps over the lazy dog, and ALL of it in Mixed Case.",
    "",
)
"""Digits, spaces, line breaks, code, contractions, scripts, normal forms, emoji, special tokens."""


def admit_tokenizer(location: ModelLocation, directory: Path) -> Any:
    """Load a tokenizer that reads texts as tokenizer.json says, where there is one.

    `directory` has its local files.
    """
    path, settings = directory / TOKENIZER_FILE, directory / _SETTINGS
    if settings.exists() and json.loads(settings.read_text("utf-8")).get("read_from") == "gguf":
        return _by_file(location)  # whatever class the architecture has in transformers
    try:
        # not that of mistral_common: it reads no special tokens, and has no chat template
        options = location.options | {"trust_remote_code": False, "mistral_format": False}
        tokenizer: Any = AutoTokenizer.from_pretrained(location.source, **options)
    except Exception as error:
        if not has_vocabulary(directory):
            raise ModelLoadError(_NO_VOCABULARY.format(directory)) from error
        if not path.exists():
            raise
        warnings.warn(
            f"{location.name}: transformers cannot build the tokenizer's class "
            f"({first_line(error)}); tokenizer.json is read without it",
            stacklevel=4,
        )
        return _by_file(location)
    if _reads_nothing(tokenizer):
        raise ModelLoadError(_NO_VOCABULARY.format(directory))
    has_languages = hasattr(tokenizer, "src_lang")  # they are with the class
    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    if not path.exists() or has_languages or not is_fast:
        return tokenizer
    reference = TokenizerFile(path)
    text = _other_text(tokenizer, reference)
    if text is None:
        return tokenizer
    warnings.warn(
        f"{location.name}: transformers' {type(tokenizer).__name__} gives {text!r} other tokens or "
        "spaces than tokenizer.json; tokenizer.json is used, programs with transformers 5 may "
        "differ",
        stacklevel=4,
    )
    known = reference.plain.get_vocab()
    # what a class sets by itself, and tokenizer_config.json may leave out
    tokens = tokenizer.special_tokens_map.items()
    own = {name: str(token) for name, token in tokens if isinstance(token, str) and token in known}
    own |= {name: getattr(tokenizer, name) for name in _CLASS_SETTINGS}
    return _by_file(location, **own)


def _by_file(location: ModelLocation, **settings: Any) -> Any:
    """tokenizer.json without a class of its own; `settings` replace those of the directory."""
    options = settings | location.options
    return PreTrainedTokenizerFast.from_pretrained(location.source, **options)


def _other_text(tokenizer: Any, reference: TokenizerFile) -> str | None:
    """The shortest probe that a class reads or writes otherwise than tokenizer.json."""
    for text in sorted(reference.probes(tokenizer), key=len):
        ids = reference.ids(text)
        ours = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if ours != ids or back != reference.plain.decode(ids, skip_special_tokens=False):
            return text
    return None


def tokenizer_paths(directory: Path) -> list[Path]:
    return [path for pattern in TOKENIZER_FILES for path in sorted(directory.glob(pattern))]


def has_vocabulary(directory: Path) -> bool:
    """True if there is a file in which a tokenizer's vocabulary may be."""
    return any(True for pattern in _VOCABULARIES for _ in directory.glob(pattern))


def _reads_nothing(tokenizer: Any) -> bool:
    """True if English and about 100 of its tokens are unknown to it: it has no vocabulary."""
    own = sorted(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys())
    text = tokenizer.convert_tokens_to_string(own[:: len(own) // 100 + 1])
    ids = tokenizer(f"the quick brown fox {text}", add_special_tokens=False, verbose=False)
    return not set(ids["input_ids"]) - {tokenizer.unk_token_id}


class TokenizerFile:
    """The library `tokenizers` on tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.plain = Tokenizer.from_file(str(path))
        self.plain.no_truncation()
        self.plain.no_padding()

    def probes(self, tokenizer: Any) -> list[str]:
        """Texts that it and this tokenizer of transformers read."""
        added = [token.content for token in self.plain.get_added_tokens_decoder().values()]
        # tokens that only tokenizer_config.json adds are plain characters here
        others = tokenizer.get_added_vocab().keys() - set(added)
        return [text for text in PROBES if not any(token in text for token in others)]

    def ids(self, text: str) -> list[int]:
        return self.plain.encode(text, add_special_tokens=False).ids
