"""The tokenizer of a GGUF file, by the rules of llama.cpp.

Also the roles of its tokens: which are special, and which end a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from paceline.models.gguf.pre_tokenizers import rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from paceline.models.gguf.fields import GgufFile

_LONGEST = 2_000  # characters of a token, of which all pairs of parts are looked up
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType
_SPACE = "\u2581"  # for a space in SentencePiece vocabularies
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
# Texts by which llama.cpp finds tokens (llama-vocab.cpp, "auto-detect special tokens by text").
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_INFILLING = {
    "pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
        *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
        *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
_OLDER = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}  # by the kind of tokenizer


def read_vocabulary(file: GgufFile) -> tuple[PreTrainedTokenizerBase, Roles]:
    """The tokenizer and the roles of its tokens; raises ModelLoadError if it is not supported."""
    model = file.get("tokenizer.ggml.model")
    if model is None:
        raise file.error("has no tokenizer (tokenizer.ggml.model)")
    tokens, kinds = _tokens(file)
    roles = _roles_of(file, tokens, kinds, model)
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens, roles)
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
    tokens: list[str] | None = file.get("tokenizer.ggml.tokens")
    if not tokens:
        raise file.error("has no tokens (tokenizer.ggml.tokens)")
    if max(map(len, tokens)) > _LONGEST:
        raise file.error(f"has a token of more than {_LONGEST:,} characters")
    kinds: list[int] = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.error(f"has {len(tokens)} tokens but {len(kinds)} token types")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    while tokens and kinds[-1] == _UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
        tokens.pop()
        kinds.pop()
    return tokens, kinds


def _byte_level(file: GgufFile, tokens: list[str], roles: Roles) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", "default")
    found = rule(name)
    if found is None:
        raise file.error(
            f"has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not supported"
        )
    merges = file.get("tokenizer.ggml.merges")
    if merges is None:
        raise file.error("has no merges (tokenizer.ggml.merges)")
    file.get("tokenizer.ggml.scores")  # llama.cpp does not use them here
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    known = [pair for pair in pairs if {*pair, "".join(pair)} <= vocabulary.keys()]
    model = BPE(vocabulary, known, ignore_merges=found.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = found.pre_tokenizer
    tokenizer.decoder = _decoder(tokens[number] for number in roles.special)
    if file.get("tokenizer.ggml.add_space_prefix", False):
        raise file.error(
            "puts a space before the text (tokenizer.ggml.add_space_prefix), which is not "
            "supported for this kind of tokenizer"
        )
    return tokenizer, found.add_bos


def _decoder(special: Iterable[str]) -> decoders.Decoder:
    """Byte-level characters become bytes, but not those of special tokens, such as <ö>."""
    alphabet, whole = set(ByteLevel.alphabet()), ByteLevel(add_prefix_space=False, use_regex=False)
    mistaken = [each for each in special if not each.isascii() and set(each) <= alphabet]
    kept = [decoders.Replace(each, whole.pre_tokenize_str(each)[0][0]) for each in mistaken]
    return decoders.Sequence([*kept, decoders.ByteLevel()]) if kept else decoders.ByteLevel()


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space
    return merge[:1] + left, right


def _sentencepiece(file: GgufFile, tokens: list[str], roles: Roles) -> Tokenizer:
    scores: list[float] | None = file.get("tokenizer.ggml.scores")
    if scores is None:
        raise file.error("has no scores of tokens (tokenizer.ggml.scores)")
    file.get("tokenizer.ggml.merges")  # llama.cpp merges by the scores alone
    file.get("tokenizer.ggml.pre")
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
        second = [*(f"{each}:1" for each in before), "$B:1", *(f"{each}:1" for each in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second],
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


@dataclass(frozen=True)
class Roles:
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
    named = _named(file, len(tokens), _DEFAULTS.get(model, {}))
    special = {
        number: kind != _USER_DEFINED
        for number, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    ends = [number for name in ("eos", "eot", "eom") if (number := named[name]) is not None]
    for part, texts in _INFILLING.items():
        number = named[f"fim_{part}"]
        if number is None:
            number = next((ids[text] for text in texts if text in ids), None)
            if number is not None:
                special[number] = True
        if number is not None and part in ("pad", "rep", "sep"):
            ends.append(number)
    for text in ENDS & ids.keys():
        special[ids[text]] = True
        ends.append(ids[text])
    special |= dict.fromkeys((ids[text] for text in _SHOWN if text in ids), False)
    for text in _not_ends({tokens[number] for number in ends}):
        ends = [number for number in ends if number != ids[text]]
        special.pop(ids[text])
        if text == "<|end|>":
            special[ids[text]] = False
    first = [] if named["eos"] is None else [named["eos"]]
    return Roles(
        bos=named["bos"],
        eos=named["eos"],
        unknown=named["unknown"],
        pad=named["padding"],
        ends=tuple(dict.fromkeys([*(each for each in first if each in ends), *sorted(ends)])),
        special=special,
    )


def _not_ends(ends: set[str]) -> set[str]:
    """Texts that are no end beside these others: gpt-oss, Solar, Gemma 4 and PLaMo."""
    calls = bool(ends & {"<|call|>", "<|calls|>"})
    found: set[str] = set()
    if calls and ends & {"<|return|>", "<|flush|>"}:
        found.add("<|end|>")
    if ends & {"<|tool_response>", "<|plamo:eos|>"}:
        found.add("</s>")
    return found & ends


def _named(file: GgufFile, count: int, defaults: dict[str, int]) -> dict[str, int | None]:
    names = ["bos", "eos", "eot", "eom", "unknown", "padding", *map("fim_{}".format, _INFILLING)]
    found: dict[str, int | None] = {}
    for name in names:
        keys = [f"tokenizer.ggml.{name}_token_id"]
        if older := _OLDER.get(name.removeprefix("fim_")):
            keys.append(f"tokenizer.ggml.{older}_token_id")
        number = next((each for key in keys if (each := file.get(key)) is not None), None)
        if number is not None and not 0 <= number < count:
            if name in ("bos", "eos", "eot", "eom"):
                raise file.error(f"has {keys[0]} = {number}, but {count} tokens")
            number = None  # as llama.cpp
        found[name] = defaults.get(name) if number is None else number
    return found
