"""Compares a tokenizer with libraries other than transformers, once; the result is kept.

transformers 5 builds the classes of many models anew from vocabulary and merges, and ignores the
normalizer, the pre-tokenizer and the decoder of tokenizer.json. Engines and earlier versions of
transformers read that file, and so does Paceline: where a class gives other tokens, the file is
read without the class, and a warning names the difference. A class that gives the same tokens, but
has other parts than the file, gets those of the file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field, ValidationError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.config import StrictModel
from paceline.environment import package_version
from paceline.errors import ModelLoadError, first_line
from paceline.fingerprints import files_fingerprint, short_hash
from paceline.models.admission.results import recall, remember
from paceline.places import TEMPLATES
from paceline.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.models.checkpoint_files import ModelLocation

_FORMAT = 4  # increase when the comparison changes, so that kept results are not used
_PACKAGES = ("transformers", "tokenizers", "sentencepiece")
_FILES = ("*.json", "*.model", "*.spm", "*.txt", "*.tiktoken")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*")
TOKENIZER_FILES += ("merges.txt", "*.model", "*.spm", "target_vocab.json", "chat_template*")
TOKENIZER_FILES += (TEMPLATES,)
_WEIGHTS = ".index.json"  # ends the name of a list of weight files
_CLASS_SETTINGS = ("padding_side", "truncation_side", "model_input_names")
_PARTS = ("model", "normalizer", "pre_tokenizer", "decoder")
_CHECK = "_paceline_check"  # attribute of a tokenizer that was compared
_MOST_SHOWN = 8  # tokens of an example in a message
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

_MOST_ADDED = 2000  # tokens that are probed one by one
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SENTENCEPIECE += ("sentencepiece.model", "source.spm")


class Difference(StrictModel):
    """A text that transformers reads otherwise than the reference.

    With the tokens of both: ids, or pieces for SentencePiece. Where only the text of the tokens
    differs, these are texts.
    """

    text: str
    transformers: tuple[int | str | None, ...] | str
    reference: tuple[int | str | None, ...] | str


class TokenizerCheck(StrictModel):
    """The comparison of a tokenizer with a reference.

    Attributes:
        reference: File that another library reads: tokenizer.json, or a SentencePiece model; None
            if there is no such file.
        transformers_class: Class that transformers chooses; None if it cannot be built.
        used: What reads texts: that class; tokenizer.json without it ("file"); or that class with
            the parts of tokenizer.json, if it has languages or no text differs ("parts").
        settings: What `used` = "file" takes from the class, such as default special tokens.
        num_probes: Compared texts, those of the added tokens included.
        num_differing: Texts that the class reads otherwise than the reference.
        example: The plainest of them.
        num_restored: Compared texts that their tokens give back exactly.
        warnings: What a user has to know, one line each.
    """

    reference: str | None
    transformers_class: str | None
    used: Literal["class", "file", "parts"] = "class"
    settings: dict[str, str | list[str]] = Field(default_factory=dict)
    num_probes: int
    num_differing: int
    example: Difference | None
    num_restored: int
    warnings: tuple[str, ...] = ()


def check_tokenizer(directory: Path, tokenizer: Any) -> TokenizerCheck:
    """The check of a loaded tokenizer; compares one that was not loaded by `admit_tokenizer`."""
    kept = vars(tokenizer).get(_CHECK)
    return kept or _compare(tokenizer, find_reference(directory))


def admit_tokenizer(location: ModelLocation, directory: Path) -> Any:
    """Load a tokenizer that reads texts as tokenizer.json says, where there is one.

    `directory` has its local files.

    Raises:
        ModelLoadError: There is no vocabulary, or it is named outside of the directory.
        Exception: What transformers raises.
    """
    _refuse_outside(directory)
    key, check = _key(directory), None
    with contextlib.suppress(ValidationError):  # nothing is kept, or it is damaged
        check = TokenizerCheck.model_validate(recall(key))
    if check is None:
        tokenizer, check = _first(directory, location)
        remember(key, check.model_dump(mode="json"))
    elif check.used == "file":
        tokenizer = _by_file(location, **check.settings)
    else:
        tokenizer = _by_class(location)
        if check.used == "parts":
            _take_parts(tokenizer, TokenizerFile(directory / TOKENIZER_FILE))
    vars(tokenizer)[_CHECK] = check
    for message in check.warnings:
        warnings.warn(f"{location.name}: {message}", stacklevel=4)
    return tokenizer


def _by_class(location: ModelLocation) -> Any:
    """With the class that transformers chooses, other than that of mistral_common.

    It reads no special tokens in texts, and has no chat template.
    """
    options = location.options | {"trust_remote_code": False, "mistral_format": False}
    return AutoTokenizer.from_pretrained(location.source, **options)


def _by_file(location: ModelLocation, **settings: Any) -> Any:
    """tokenizer.json without a class of its own; `settings` replace those of the directory."""
    options = settings | location.options
    return PreTrainedTokenizerFast.from_pretrained(location.source, **options)


def _first(directory: Path, location: ModelLocation) -> tuple[Any, TokenizerCheck]:
    """Load and compare; choose what reads texts."""
    faults: list[str] = []
    reference = None
    try:
        reference = find_reference(directory)
    except Exception as error:  # tokenizers raises whatever its parser finds
        faults.append(
            f"tokenizer.json cannot be read by the library tokenizers ({first_line(error)}), so "
            "nothing confirms the tokens of texts; copy the file again"
        )
    try:
        converted = _read(directory / _SETTINGS).get("read_from") == "gguf"
        tokenizer = _by_file(location) if converted else _by_class(location)
    except Exception as error:
        if not has_vocabulary(directory):
            raise ModelLoadError(_NO_VOCABULARY.format(directory)) from error
        if not isinstance(reference, TokenizerFile):
            raise
        tokenizer = _by_file(location)
        faults.append(
            f"transformers cannot build the tokenizer's class ({first_line(error)}); "
            "tokenizer.json is read without it"
        )
        check = _compare(tokenizer, reference)
        check = check.model_copy(update={"used": "file", "transformers_class": None})
    else:
        check = _compare(tokenizer, reference)
        if converted:  # whatever class the architecture has in transformers
            check = check.model_copy(update={"used": "file"})
        elif isinstance(reference, TokenizerFile):
            tokenizer, check = _replaced(tokenizer, check, reference, location)
        if check.example is not None:
            faults.append(_difference(check, check.example))
    if _reads_nothing(tokenizer):
        raise ModelLoadError(_NO_VOCABULARY.format(directory))
    faults += _doubts(directory, tokenizer, reference)
    return tokenizer, check.model_copy(update={"warnings": tuple(faults)})


def _replaced(
    tokenizer: Any, check: TokenizerCheck, reference: TokenizerFile, location: ModelLocation
) -> tuple[Any, TokenizerCheck]:
    """The tokenizer that reads as the file does, if one does; with the differences of the class."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer, check
    settings: dict[str, Any] = {}
    if not check.num_differing and _parts(tokenizer.backend_tokenizer) == _parts(reference.plain):
        return tokenizer, check
    if not check.num_differing or hasattr(tokenizer, "src_lang"):  # other texts may differ
        used, found = "parts", copy.deepcopy(tokenizer)
        _take_parts(found, reference)
    else:  # what a class sets by itself, and tokenizer_config.json may leave out
        known = reference.plain.get_vocab()
        tokens = tokenizer.special_tokens_map.items()
        settings = {
            name: str(token) for name, token in tokens if isinstance(token, str) and token in known
        }
        settings |= {name: getattr(tokenizer, name) for name in _CLASS_SETTINGS}
        used, found = "file", _by_file(location, **settings)
    again = _compare(found, reference)
    if again.num_differing and again.num_differing >= check.num_differing:
        return tokenizer, check
    update = {"used": used, "settings": settings, "num_restored": again.num_restored}
    return found, check.model_copy(update=update)


def _take_parts(tokenizer: Any, reference: TokenizerFile) -> None:
    """Give a class the parts of tokenizer.json that read texts; its languages stay."""
    for part in _PARTS:
        setattr(tokenizer.backend_tokenizer, part, getattr(reference.plain, part))


def _parts(backend: Tokenizer) -> dict[str, Any]:
    """What reads texts, as in tokenizer.json."""
    settings = json.loads(backend.to_str())
    return {part: settings[part] for part in _PARTS}


def _compare(tokenizer: Any, reference: Reference | None) -> TokenizerCheck:
    found: list[Difference] = []
    num_probes = num_restored = 0
    for text in [] if reference is None else reference.probes(tokenizer):
        assert reference is not None, "without a reference there are no probes"
        ours, theirs = reference.read_by(tokenizer, text), reference.reads(text)
        num_probes += 1
        num_restored += ours.text == text
        if ours.tokens != theirs.tokens:
            pair = {"transformers": tuple(ours.tokens), "reference": tuple(theirs.tokens)}
            found.append(Difference(text=text, **pair))
        elif ours != theirs:
            pair = {"transformers": str(ours.text), "reference": str(theirs.text)}
            found.append(Difference(text=text, **pair))
    return TokenizerCheck(
        reference=None if reference is None else reference.source,
        transformers_class=type(tokenizer).__name__,
        num_probes=num_probes,
        num_differing=len(found),
        # a difference of tokens before one of texts, and a short text before others
        example=min(
            found, key=lambda each: (isinstance(each.reference, str), len(each.text)), default=None
        ),
        num_restored=num_restored,
    )


def _difference(check: TokenizerCheck, example: Difference) -> str:
    """The warning about texts that a class reads otherwise than the reference."""
    if isinstance(example.reference, str) or isinstance(example.transformers, str):
        what, shown = "text of the tokens", [repr(example.reference), repr(example.transformers)]
    else:
        both = example.reference, example.transformers
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))
        same = sum(1 for _ in pairs)
        what, shown = "tokens", [_from(same, tokens) for tokens in both]
    message = (
        f"{check.reference} gives {example.text!r} the {what} {shown[0]}, transformers' "
        f"{check.transformers_class} {shown[1]}"
    )
    if check.used == "class":
        return f"{message}, which is used; programs that read {check.reference} may differ"
    return f"{message}; {check.reference} is used, programs with transformers 5 may differ"


def _from(first: int, tokens: tuple[int | str | None, ...]) -> str:
    """Tokens from the first that differs, in words."""
    part = ", ".join(map(str, tokens[first : first + _MOST_SHOWN]))
    more = ", ..." if len(tokens) > first + _MOST_SHOWN else ""
    return f"[{'..., ' if first else ''}{part}{more}]"


def _key(directory: Path) -> str:
    """Hash of what a check depends on: the tokenizer's files, config.json and versions."""
    files = {file for pattern in _FILES for file in directory.glob(pattern)}
    kept = sorted(file for file in files if not file.name.endswith(_WEIGHTS) and file.is_file())
    facts = [f"{_FORMAT} {__version__} {files_fingerprint(kept)}"]
    facts += [f"{package} {package_version(package)}" for package in _PACKAGES]
    return short_hash(["\n".join(facts)])


def tokenizer_paths(directory: Path) -> list[Path]:
    """What a directory holds of a tokenizer."""
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


def _doubts(directory: Path, tokenizer: Any, reference: Reference | None) -> Iterator[str]:
    """What is read in a way that a user, or another program, may not expect; one line each."""
    settings = _read(directory / _SETTINGS)
    if isinstance(reference, TokenizerFile) and not hasattr(tokenizer, "src_lang"):
        yield from _frame(tokenizer, reference, settings)
    yield from _misplaced(tokenizer, settings)
    known = tokenizer.get_vocab()
    if count := len(known) - len(set(known.values())):
        yield f"{count} tokens have the id of another token; the tokenizer's files are damaged"
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


def _refuse_outside(directory: Path) -> None:
    """Raise a ModelLoadError if tokenizer_config.json names a vocabulary outside of its directory.

    transformers ignores other paths that the file may hold.
    """
    for name in _read(directory / _SETTINGS).get("fast_tokenizer_files") or ():
        if Path(str(name)).name != name:
            raise ModelLoadError(
                f"{directory / _SETTINGS} names {name!r}, which is not a file in its "
                "directory; remove it from fast_tokenizer_files"
            )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found if isinstance(found, dict) else {}


class Reading(NamedTuple):
    """What a library makes of a text; `text` is that of its tokens, None if it is not compared."""

    tokens: list[Any]
    text: str | None


class TokenizerFile:
    """The library `tokenizers` on tokenizer.json.

    Attributes:
        source: The file that it reads.
    """

    source = TOKENIZER_FILE

    def __init__(self, path: Path) -> None:
        self.plain = Tokenizer.from_file(str(path))
        self.plain.no_truncation()
        self.plain.no_padding()

    def probes(self, tokenizer: Any) -> list[str]:
        """Texts that it and this tokenizer of transformers read; see `reads` and `read_by`."""
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
    """As `TokenizerFile`, the library `sentencepiece` on its model; tokens are pieces, not ids.

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
        if getattr(tokenizer, "separate_vocabs", False):  # of Marian, ids name written tokens
            names = {number: token for token, number in tokenizer.get_vocab().items()}
            found = [names[number] for number in ids]
        else:
            found = tokenizer.convert_ids_to_tokens(ids)
        return Reading(_unknown_once(found, {*found} - {tokenizer.unk_token}), None)


Reference: TypeAlias = TokenizerFile | SentencePieceFile
"""A library that reads the tokenizer's files by itself."""


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
