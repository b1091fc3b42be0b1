"""The tokenizer of a GGUF file, by the rules of llama.cpp.

Also the roles of its tokens: which are special, and which end a text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from paceline.models.gguf.fields import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType
_SPACE = "\u2581"  # for a space in SentencePiece vocabularies
# Texts by which llama.cpp finds tokens (llama-vocab.cpp, "auto-detect special tokens by text").
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    # of infilling
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
_INFILLING = {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>"),
}
_ENDING = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}  # by the kind of tokenizer


def read_vocabulary(file: GgufFile) -> tuple[PreTrainedTokenizerBase, Roles]:
    """The tokenizer and the roles of its tokens; raises ModelLoadError if it is not supported."""
    model = file.needed("tokenizer.ggml.model")
    tokens, kinds = _tokens(file)
    roles = _roles_of(file, tokens, kinds, model)
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(file, tokens, roles), True
    else:
        raise file.error(
            f"has a tokenizer of the kind {model!r} (tokenizer.ggml.model), which is not supported"
        )
    # llama.cpp, "set attributes by model name"
    name = str(file.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    tokenizer.add_tokens(
        [
            AddedToken(
                tokens[number],
                special=control,
                normalized=False,
                rstrip=strips and tokens[number] not in _PHI3_KEEPS,
            )
            for number, control in sorted(roles.special.items())
        ]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise file.error(f"has {len(tokens)} tokens, of which some have the same text")
    _add_ends(file, tokenizer, tokens, roles, add_bos=add_bos)
    named = {"bos": roles.bos, "eos": roles.eos, "unk": roles.unknown, "pad": roles.pad}
    # transformers makes a special token of each; a padding token may be ordinary text such as "!"
    texts = {
        f"{name}_token": tokens[number] for name, number in named.items() if number in roles.special
    }
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        read_from="gguf",  # stored in tokenizer_config.json; no class of transformers replaces it
        **texts,
    )
    found.chat_template = _templates(file)
    return found, roles


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """Text and type of each token, without rows at the end that have no token."""
    tokens: list[str] = file.needed("tokenizer.ggml.tokens")
    kinds: list[int] = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    while tokens and kinds[-1] == _UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
        tokens.pop()
        kinds.pop()
    return tokens, kinds


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", "default")
    found = RULES.get(name)
    if found is None:
        raise file.error(
            f"has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not supported"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in file.needed("tokenizer.ggml.merges")]
    known = [pair for pair in pairs if {*pair, "".join(pair)} <= vocabulary.keys()]
    tokenizer = Tokenizer(BPE(vocabulary, known, ignore_merges=found.ignore_merges))
    tokenizer.pre_tokenizer = found.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, found.add_bos


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space
    return merge[:1] + left, right


def _sentencepiece(file: GgufFile, tokens: list[str], roles: Roles) -> Tokenizer:
    scores: list[float] = file.needed("tokenizer.ggml.scores")
    unknown = None if roles.unknown is None else tokens[roles.unknown]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary, scores)
    model = BPE(vocabulary, merges, unk_token=unknown, fuse_unk=False, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [normalizers.Prepend(_SPACE), spaces] if prefix else [spaces]
    tokenizer.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best score first: SentencePiece merges so."""
    found: list[tuple[float, int, str, str]] = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], number, left, right))
    return [(left, right) for _, _, left, right in sorted(found, key=lambda each: each[:2])]


def _add_ends(
    file: GgufFile, tokenizer: Tokenizer, tokens: list[str], roles: Roles, *, add_bos: bool
) -> None:
    """Put BOS and EOS around a text as the file says."""
    ends: dict[str, list[str]] = {}
    for name, number, default in (("bos", roles.bos, add_bos), ("eos", roles.eos, False)):
        adds = bool(file.get(f"tokenizer.ggml.add_{name}_token", default))
        if adds and number is None:
            raise file.error(
                f"adds {name.upper()} to texts (tokenizer.ggml.add_{name}_token) but "
                f"has no tokenizer.ggml.{name}_token_id"
            )
        ends[name] = [tokens[number]] if adds and number is not None else []
    before, after = ends.values()
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(each, tokens.index(each)) for each in {*before, *after}],
        )


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    default: str | None = file.get("tokenizer.chat_template")
    names: list[str] = file.get("tokenizer.chat_templates") or []
    others = {name: file.get(f"tokenizer.chat_template.{name}") for name in names}
    others = {name: text for name, text in others.items() if text is not None}
    if not others:
        return default
    return others if default is None else {"default": default, **others}


class Roles(NamedTuple):
    """Ids of special tokens, of tokens that end a text (`eos` first) and that a text may spell.

    `special` is True for control tokens, which a decoded text omits.
    """

    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    ends: tuple[int, ...]
    special: dict[int, bool]


def _roles_of(file: GgufFile, tokens: list[str], kinds: list[int], model: str) -> Roles:
    """The roles as llama.cpp finds them, from keys and from the texts of tokens."""
    ids = {token: number for number, token in enumerate(tokens)}
    special = {
        number: kind != _USER_DEFINED
        for number, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    special |= {ids[text]: True for text in (ENDS | _INFILLING) & ids.keys()}
    named: dict[str, int | None] = {}
    for name in ("bos", "unknown", "padding", *_ENDING):
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        valid = number is not None and 0 <= number < len(tokens)
        named[name] = number if valid else _DEFAULTS.get(model, {}).get(name)
    ends = {number for name in _ENDING if (number := named[name]) is not None}
    ends |= {ids[text] for text in ENDS & ids.keys()}
    first = [] if named["eos"] is None else [named["eos"]]
    return Roles(
        bos=named["bos"],
        eos=named["eos"],
        unknown=named["unknown"],
        pad=named["padding"],
        ends=tuple(dict.fromkeys([*first, *sorted(ends)])),
        special=special,
    )


# Pre-tokenizers by name, to read and to write files. llama.cpp splits by each expression in turn,
# and keeps whole what an expression does not match, as `Split(..., "isolated")` of tokenizers does.
# The expressions are those of llama-vocab.cpp, written for Oniguruma. Its categories are coarse:
# any letter beyond ASCII is upper and lower case at once.
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
