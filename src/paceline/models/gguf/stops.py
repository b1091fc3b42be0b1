"""Roles of the tokens of a GGUF file: which are special, and which end a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.models.gguf.fields import GgufFile

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
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # gguf.TokenType
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}  # by the kind of tokenizer


@dataclass(frozen=True)
class Roles:
    """Roles of tokens.

    Attributes:
        bos, eos, unknown, pad: Their ids; None if there is none.
        ends: Tokens that end a text, `eos` first.
        special: Tokens that a text may spell; True for control tokens, which a decoded text omits.
    """

    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    ends: tuple[int, ...]
    special: dict[int, bool]


def roles_of(file: GgufFile, tokens: list[str], kinds: list[int], model: str) -> Roles:
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
