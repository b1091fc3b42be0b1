"""Write a tokenizer into a GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import UnsupportedModelError
from paceline.models.gguf import open_gguf
from paceline.models.gguf.pre_tokenizers import name_of
from paceline.models.gguf.vocabulary import ENDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gguf import GGUFWriter

_PREFIX = "tokenizer."
# Control tokens for llama.cpp's converter, too; DeepSeek uses wide bars.
_LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")


class Tokenizer(NamedTuple):
    """A tokenizer and the path or hub name of its model: the target, if there is one."""

    source: str
    loaded: Any


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Tokenizer, num_rows: int, ends: Sequence[int]
) -> None:
    """Write the keys of a tokenizer with `num_rows` tokens; for a GGUF source, copy its keys.

    `ends` are the tokens that end a text.

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
    _refuse_other(settings, source)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(settings, source))
    tokens, kinds = _tokens(tokenizer.loaded, settings, num_rows)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = settings["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    _add_roles(writer, tokenizer.loaded, num_rows)
    _add_ends(writer, tokenizer.loaded, tokens, ends)


_ALTERNATIVE = (
    "convert the exported directory with llama.cpp's convert_hf_to_gguf.py, or give a GGUF target"
)


def _copy_keys(writer: GGUFWriter, path: Path) -> None:
    import gguf

    for field in open_gguf(path).reader.fields.values():
        if field.name.startswith(_PREFIX):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)


def _refuse_other(settings: dict[str, Any], source: str) -> None:
    """Raise unless this is a byte-level BPE as llama.cpp's."""
    model = settings["model"]
    kind = (settings.get("normalizer") or {}).get("type", "NFC")
    others = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or kind != "NFC" or any(model.get(name) for name in others):
        raise UnsupportedModelError(
            f"the tokenizer of {source} is not a plain byte-level BPE, which the GGUF export "
            f"needs; {_ALTERNATIVE}"
        )
    for token in settings["added_tokens"]:
        for name in ("lstrip", "rstrip", "single_word"):
            if token.get(name):
                raise UnsupportedModelError(
                    f"the tokenizer of {source} has {name}=true for {token['content']}, which "
                    f"llama.cpp does not know; {_ALTERNATIVE}"
                )


def _pre_tokenizer(settings: dict[str, Any], source: str) -> str:
    """llama.cpp's name of the pre-tokenizer, derived from the settings of the tokenizer.

    So a new vocabulary with a known pre-tokenizer is supported.
    """
    splits = settings.get("pre_tokenizer") or {}
    ignore_merges = bool(settings["model"].get("ignore_merges"))
    name = name_of(splits, ignore_merges=ignore_merges)
    if name is None:
        parts = [part.get("type") for part in splits.get("pretokenizers", [splits])]
        raise UnsupportedModelError(
            f"the tokenizer of {source} has pre-tokenizers {parts} with "
            f"ignore_merges={str(ignore_merges).lower()}, for which llama.cpp has no name; "
            f"{_ALTERNATIVE}"
        )
    return name


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


def _add_roles(writer: GGUFWriter, tokenizer: Any, num_rows: int) -> None:
    roles = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
    }
    for role, add in roles.items():
        number = getattr(tokenizer, f"{role}_token_id")
        if number is not None and number < num_rows:  # transformers adds tokens to some
            add(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _add_ends(writer: GGUFWriter, tokenizer: Any, tokens: list[str], ends: Sequence[int]) -> None:
    """Write the tokens that end a text and that llama.cpp does not know by their texts."""
    known = {tokenizer.eos_token_id, *(n for n, token in enumerate(tokens) if token in ENDS)}
    left = [number for number in ends if number not in known and number < len(tokens)]
    keys = (writer.add_eot_token_id, writer.add_eom_token_id)
    if len(left) > len(keys):
        raise UnsupportedModelError(
            f"{len(left)} tokens end a text besides EOS ({left}), of which a GGUF file holds "
            f"{len(keys)}; {_ALTERNATIVE}"
        )
    for add, number in zip(keys, left, strict=False):
        add(number)
