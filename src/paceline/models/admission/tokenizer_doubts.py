"""Contradictions between a tokenizer's files, its model and what programs make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError
from paceline.models.admission.tokenizer_probes import TokenizerFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.models.admission.tokenizer_probes import Reference


NO_VOCABULARY = (
    "{} has a tokenizer_config.json, but no file with the tokenizer's vocabulary; copy "
    "tokenizer.json, or the files that tokenizer_config.json belongs to, from the original model"
)
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.spm", "*.tiktoken")


def has_vocabulary(directory: Path) -> bool:
    """True if there is a file in which a tokenizer's vocabulary may be."""
    return any(True for pattern in _VOCABULARIES for _ in directory.glob(pattern))


def reads_nothing(tokenizer: Any) -> bool:
    """True if a text in English has no known token, as by a class without a vocabulary."""
    ids = tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"]
    return not set(ids) - {tokenizer.unk_token_id}


def doubts(directory: Path, tokenizer: Any, reference: Reference | None) -> Iterator[str]:
    """What is read in a way that a user, or another program, may not expect; one line each."""
    settings = read_settings(directory)
    if isinstance(reference, TokenizerFile) and not hasattr(tokenizer, "src_lang"):
        yield from _frame(tokenizer, reference, settings)
    yield from _misplaced(tokenizer, settings)
    yield from _shared(tokenizer)
    named = {str(settings.get(f"{key}_token")) for key in ("bos", "eos")}
    if isinstance(reference, TokenizerFile):
        named |= reference.plain.get_vocab().keys()
    yield from _beyond(tokenizer, named, _read(directory / "config.json"))


def _frame(tokenizer: Any, reference: TokenizerFile, settings: dict[str, Any]) -> Iterator[str]:
    """Files and class that disagree on the special tokens around a text."""
    ours, theirs = tokenizer("a")["input_ids"], reference.plain.encode("a").ids
    if ours != theirs:
        yield (
            f"with special tokens, tokenizer.json gives 'a' the tokens {theirs}, transformers' "
            f"{type(tokenizer).__name__} {ours}, which is used, as by vLLM"
        )
    for key, at in (("bos", 0), ("eos", -1)):
        wanted, token = settings.get(f"add_{key}_token"), getattr(tokenizer, f"{key}_token_id")
        if isinstance(wanted, bool) and token is not None and (ours[at] == token) != wanted:
            adds = "adds none" if wanted else "adds one"
            yield (
                f"tokenizer_config.json has add_{key}_token: {str(wanted).lower()}, but "
                f"tokenizer.json {adds}; transformers and vLLM follow tokenizer.json, which is "
                "used, and llama.cpp follows tokenizer_config.json: make them agree"
            )


def _misplaced(tokenizer: Any, settings: dict[str, Any]) -> Iterator[str]:
    """Added tokens that have another id than tokenizer_config.json says."""
    listed = settings.get("added_tokens_decoder")
    known = tokenizer.get_vocab()
    for number, token in (listed if isinstance(listed, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else token
        if str(known.get(content)) != number:
            yield (
                f"tokenizer_config.json gives {content!r} the id {number}, but it is read as "
                f"{known.get(content)}; correct added_tokens_decoder"
            )
            return


def _shared(tokenizer: Any) -> Iterator[str]:
    """Tokens with the id of another."""
    known = tokenizer.get_vocab()
    count = len(known) - len(set(known.values()))
    if count:
        yield f"{count} tokens have the id of another token; the tokenizer's files are damaged"


def _beyond(tokenizer: Any, named: set[str], config: dict[str, Any]) -> Iterator[str]:
    """Tokens that the files name, without a row in the model's embedding; not one for padding."""
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(rows, int):
        return
    known = tokenizer.get_vocab().items()
    far = [(number, token) for token, number in known if number >= rows and token in named]
    beyond = sorted(each for each in far if each[1] != tokenizer.pad_token)
    if beyond:
        number, token = beyond[0]
        yield (
            f"the tokenizer has {len(beyond)} tokens beyond the model's {rows}, for example "
            f"{token!r} with id {number}; prompts that hold them are refused"
        )


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if there is none."""
    return _read(directory / "tokenizer_config.json")


def refuse_outside(directory: Path) -> None:
    """Raise a ModelLoadError if tokenizer_config.json names a vocabulary outside of its directory.

    transformers ignores other paths that the file may hold.
    """
    for name in read_settings(directory).get("fast_tokenizer_files") or ():
        if Path(str(name)).name != name:
            raise ModelLoadError(
                f"{directory / 'tokenizer_config.json'} names {name!r}, which is not a file in its "
                "directory; remove it from fast_tokenizer_files"
            )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found if isinstance(found, dict) else {}
