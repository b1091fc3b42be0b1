"""Pre-tokenizers of llama.cpp by name, for reading GGUF files and for writing them.

llama.cpp splits by each expression in turn, and what an expression does not match is kept whole:
`Split(..., "isolated")` of tokenizers does the same. The expressions are those of llama.cpp's
llama-vocab.cpp, written for Oniguruma. The categories of llama.cpp are coarse: any letter beyond
ASCII is upper and lower case at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS, _OTHERS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_LINES, _SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_REST = rf"{_OTHERS}[\r\n]*|{_LINES}|{_SPACES}"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


class Rule(NamedTuple):
    """What llama.cpp derives from the name of a pre-tokenizer.

    Attributes:
        splits: Expressions that split the text, one after the other.
        ignore_merges: A word that is a token is this token, whatever the merges say.
        add_bos: A text begins with BOS unless the file says otherwise.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """The same rule for tokenizers."""
        splits = [Split(Regex(each), "isolated") for each in self.splits]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


RULES = {
    "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Rule((_WORDS,)),
    "smollm": Rule((r"\p{N}", _WORDS)),
    "llama-bpe": Rule((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": Rule((_LLAMA3,)),  # Phi-4, Granite 4
    "qwen2": Rule((_QWEN2,)),
    "tekken": Rule(  # Mistral
        (rf"{_CASES}|\p{{N}}|{_OTHERS}[\r\n/]*|{_LINES}|{_SPACES}",),
        ignore_merges=True,
        add_bos=True,
    ),
}
# other names of the same; Granite's is refact
RULES |= dict.fromkeys(("starcoder", "refact"), RULES["smollm"])
RULES |= dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), RULES["llama-bpe"])
RULES |= {"smaug-bpe": RULES["dbrx"], "deepseek-r1-qwen": RULES["qwen2"]}


def name_of(settings: dict[str, Any] | None, *, ignore_merges: bool) -> str | None:
    """llama.cpp's name of a byte-level pre-tokenizer; None if it has no equivalent.

    `settings` is `pre_tokenizer` of tokenizer.json.
    """
    found = tuple(_splits_of(settings or {}))
    for name, known in RULES.items():
        if known.ignore_merges == ignore_merges and found == (*map(_plain, known.splits), _BYTES):
            return name
    return None


_BYTES = "bytes"  # byte-level characters without a split of their own


def _splits_of(part: dict[str, Any]) -> Iterator[str]:
    """The expressions of a pre-tokenizer, as `_plain` writes them."""
    match part:
        case {"type": "Sequence", "pretokenizers": parts}:
            for each in parts:
                yield from _splits_of(each)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            if part.get("use_regex", True):
                yield _plain(_WORDS)
            yield _BYTES
        case {"type": "Digits", "individual_digits": True}:
            yield r"\p{N}"
        case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}:
            yield "other" if part.get("invert") else _plain(pattern)
        case _:
            yield "other"


def _plain(pattern: str) -> str:
    """One way to write expressions that mean the same."""
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t")
    pattern = pattern.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", _SHORT)
    return pattern.removesuffix(r"|\s+") if pattern.startswith(_WORDS) else pattern
