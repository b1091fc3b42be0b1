"""Write a tokenizer into a GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_PREFIX = "tokenizer."
# Control tokens for llama.cpp's converter, too; DeepSeek uses wide bars.
_LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""


class Tokenizer(NamedTuple):
    """A tokenizer and the path or hub name of its model: the target, if there is one."""

    source: str
    loaded: Any


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, num_rows: int) -> None:
    """Write the keys of a tokenizer with `num_rows` tokens; for a GGUF source, copy its keys.

    Raises:
        UnsupportedModelError: llama.cpp has no equivalent of this tokenizer, as far as known here.
    """
    source = tokenizer.source
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        _copy_keys(writer, path)
        return
    backend = getattr(tokenizer.loaded, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{source} has no tokenizer.json, which the GGUF export needs; {_ALTERNATIVE}"
        )
    settings = json.loads(backend.to_str())
    kind = (settings.get("normalizer") or {}).get("type", "NFC")
    if (
        settings["model"]["type"] != "BPE"
        or settings["model"].get("byte_fallback")
        or kind != "NFC"
    ):
        raise UnsupportedModelError(
            f"the tokenizer of {source} is not a plain byte-level BPE, which the GGUF export "
            f"needs; {_ALTERNATIVE}"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(settings, source))
    tokens, kinds = _tokens(tokenizer.loaded, settings, num_rows)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = settings["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    _add_roles(writer, tokenizer.loaded)


_ALTERNATIVE = (
    "convert the exported directory with llama.cpp's convert_hf_to_gguf.py, or give a GGUF target"
)


def _copy_keys(writer: GGUFWriter, path: Path) -> None:
    import gguf

    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith(_PREFIX):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)


def _pre_tokenizer(settings: dict[str, Any], source: str) -> str:
    """llama.cpp's name of the pre-tokenizer, derived from the settings of the tokenizer.

    So a new vocabulary with a known pre-tokenizer is supported.
    """
    splits = settings.get("pre_tokenizer") or {}
    parts = splits.get("pretokenizers", [splits])
    names = {
        ("words",): "gpt-2",
        ("digits", "words"): "smollm",
        ("llama3", "bytes"): "llama-bpe",
        ("qwen2", "bytes"): "qwen2",
    }
    name = names.get(tuple(map(_known_part, parts)))
    # llama.cpp applies ignore_merges for Llama 3 only.
    if name is None or bool(settings["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise UnsupportedModelError(
            f"the tokenizer of {source} has pre-tokenizers {[part.get('type') for part in parts]}, "
            f"which is none of the supported ones ({', '.join(names.values())}); {_ALTERNATIVE}"
        )
    return name


def _known_part(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "words" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part.get("individual_digits"):
        return "digits"
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        pattern = part.get("pattern", {}).get("Regex")
        return {_LLAMA3: "llama3", _QWEN2: "qwen2"}.get(pattern, "other")
    return "other"


def _tokens(tokenizer: Any, settings: dict[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    """Text and type of each token; rows without a token are unused."""
    from gguf import TokenType

    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {token["id"]: token["special"] for token in settings["added_tokens"]}
    tokens: list[str] = []
    kinds: list[int] = []
    for number in range(num_rows):
        if number not in by_id:
            tokens.append(f"[PAD{number}]")
            kinds.append(TokenType.UNUSED)
            continue
        tokens.append(by_id[number])
        if number in special:
            controls = special[number] or _LOOKS_SPECIAL.fullmatch(by_id[number])
            kinds.append(TokenType.CONTROL if controls else TokenType.USER_DEFINED)
        else:
            kinds.append(TokenType.NORMAL)
    return tokens, kinds


def _add_roles(writer: GGUFWriter, tokenizer: Any) -> None:
    roles = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
    }
    for role, add in roles.items():
        number = getattr(tokenizer, f"{role}_token_id")
        if number is not None:
            add(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
