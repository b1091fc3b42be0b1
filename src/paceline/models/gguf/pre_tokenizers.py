"""Pre-tokenizers of llama.cpp by name, for reading GGUF files and for writing them.

llama.cpp splits by each expression in turn, and what an expression does not match is kept whole:
`Split(..., "isolated")` of tokenizers does the same. The expressions are those of llama.cpp's
llama-vocab.cpp, written for Oniguruma. The categories of llama.cpp are coarse: any letter beyond
ASCII is upper and lower case at once, and ranges of characters hold no white space beyond ASCII.
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
_MARKED = r"[\p{L}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASES_REST = rf"{_OTHERS}[\r\n/]*|{_LINES}|{_SPACES}"
_SYMBOLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK = rf"{_SYMBOLS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?{_MARKED}+| ?[\p{{P}}\p{{S}}]+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\\S]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_NOT_PUNCTUATED = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_ALPHABETS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943"
)
_WIDE = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN2.replace(r"\p{L}+", rf"{_MARKED}+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),),
    "jais-2": (
        _LLAMA3.removesuffix(_SPACES)
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "deepseek-llm": (
        "[\r\n]",
        rf"\s?[{_ALPHABETS}]+",
        rf"\s?[!-/:-~{_WIDE}&&\S]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", _KANA, rf"{_DEEPSEEK}[\r\n]*|{_LINES}|{_SPACES}"),
    "spark2_5": (r"\p{N}{1,3}", _KANA, rf"{_DEEPSEEK}|[\r\n]|{_SPACES}", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]"),
    "bloom": (_NOT_PUNCTUATED,),
    "viking": (_NOT_PUNCTUATED, r"\p{N}"),
    "tekken": (rf"{_CASES % ('', '')}|\p{{N}}|{_CASES_REST}",),
    "gpt-4o": (rf"{_CASES % (f'{_SHORT}?', f'{_SHORT}?')}|\p{{N}}{{1,3}}|{_CASES_REST}",),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        "([\\t\\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _WORDS,
    ),
    "bailingmoe": (
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_LETTERS}|\p{{N}}|{_OTHERS}[\r\n]*|\s*[\r\n]"
        rf"|{_SPACES}",
    ),
    "seed-coder": (
        rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",
    ),
    "ufakzeka": (_QWEN2.removeprefix(f"{_SHORT}|"),),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "exaone-moe": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{_OTHERS}[\r\n/]?|\s*[\r\n]|{_SPACES}",
    ),
    "minicpm5": (r"\p{N}{1,3}", rf"{_SHORT}|{_LETTERS}|\p{{N}}+|{_REST}"),
    "youtu": (_YOUTU, rf"[^\r\n\p{{L}}\p{{N}}]?{_MARKED}+{_SHORT}?|\p{{N}}|{_CASES_REST}"),
}
_LLAMA3_NAMES = ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_LLAMA3_NAMES += ("jina-v5-nano",)
_SAME = {
    "gpt-2": (
        *("phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0"),
        *("mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    ),
    "smollm": (
        *("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    "llama-bpe": (*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"),
    "qwen2": (
        *("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
        "grok-2",
    ),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
}
_LIKE = {name: rule for rule, names in _SAME.items() for name in (rule, *names)}
_IGNORE_MERGES = {"llama-bpe", *_LLAMA3_NAMES, "minicpm5", "youtu", "glm4", "glm5", "tekken"}
_ADD_BOS = {"llama-bpe", *_LLAMA3_NAMES, "tekken", "chameleon"}


class Rule(NamedTuple):
    """What llama.cpp derives from the name of a pre-tokenizer.

    Attributes:
        splits: Expressions that split the text, one after the other.
        ignore_merges: A word that is a token is this token, whatever the merges say.
        add_bos: A text begins with BOS unless the file says otherwise.
    """

    splits: tuple[str, ...]
    ignore_merges: bool
    add_bos: bool

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """The same rule for tokenizers."""
        splits = [Split(Regex(each), "isolated") for each in self.splits]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def rule(name: str) -> Rule | None:
    """The rule of llama.cpp with this name; None if there is none here."""
    splits = SPLITS.get(_LIKE.get(name, name))
    return None if splits is None else Rule(splits, name in _IGNORE_MERGES, name in _ADD_BOS)


def name_of(settings: dict[str, Any] | None, *, ignore_merges: bool) -> str | None:
    """llama.cpp's name of a byte-level pre-tokenizer; None if it has no equivalent.

    `settings` is `pre_tokenizer` of tokenizer.json.
    """
    found = tuple(_splits_of(settings or {}))
    for name in (*SPLITS, *_LIKE):
        known = rule(name)
        assert known is not None
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
        case {"type": "Digits", "individual_digits": individual}:
            yield r"\p{N}" if individual else r"\p{N}+"
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            yield _plain(SPLITS["falcon"][0])
        case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}:
            yield "other" if part.get("invert") else _plain(pattern)
        case _:
            yield "other"


def _plain(pattern: str) -> str:
    """One way to write expressions that mean the same."""
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t")
    pattern = pattern.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", _SHORT)
    pattern = pattern.replace(
        "'(?i:[sdmt]|ll|ve|re)", r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    )
    return pattern.removesuffix(r"|\s+") if pattern.startswith(_WORDS) else pattern
