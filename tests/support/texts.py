"""Chat templates and tokenizers of the families that users bring, and texts of the command line.

The templates in chat_templates/ are written after the public descriptions of these families, and
the expected texts in families.yaml by hand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
TOOL = {"type": "function", "function": {"name": "weather"}}
TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
CALL = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}, "type": "function"}
CALLED = '{"name": "weather", "arguments": {"city": "Oslo"}}'

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": "4 cats"},
]
THOUGHT = [
    *TALK[:2],
    {"role": "assistant", "content": "<think>\ngreet\n</think>\n\nhello"},
    TALK[3],
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4 cats"},
]
WEATHER = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "call00001"}]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "wet"},
    {"role": "assistant", "content": "take a coat"},
]


class Family(NamedTuple):
    """What a template is tried with.

    Attributes:
        special: Its special tokens; the first is BOS, the second the tokenizer's end of text.
        stops: The tokens at which the model stops.
        talk: A chat of two turns; one text, or a text a turn if earlier turns are rendered anew.
        weather: A chat that calls a tool.
    """

    name: str
    special: str
    stops: str
    talk: str | tuple[str, ...]
    weather: str | tuple[str, ...]
    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]


CHATML = "<|endoftext|> <|im_end|> <|im_start|>"


def _family(
    *, talk: Any, weather: Any = (), thinks: bool = False, arguments: Any = None, **others: str
) -> Family:
    talk, weather = (tuple(one) if isinstance(one, list) else one for one in (talk, weather))
    messages = THOUGHT if thinks else TALK
    return Family(
        talk=talk, weather=weather, messages=messages, arguments=arguments or {}, **others
    )


CHAT_FAMILIES = [
    _family(**one) for one in yaml.safe_load((TEMPLATES / "families.yaml").read_text("utf-8"))
]
CHAT_FAMILY_NAMES = [f"{each.name} {list(each.arguments) or ''}" for each in CHAT_FAMILIES]


def byte_tokenizer(template: str, special: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level tokens with merges over spaces, and special tokens; the first two: BOS and EOS."""
    merges = [("e", "l"), ("el", "l"), ("Ġ", "c"), ("Ġc", "a"), ("Ċ", "Ċ"), (">", "Ċ")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    model = BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bos, eos, *rest = special.split()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        extra_special_tokens=rest,
        chat_template=template,
    )


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    return byte_tokenizer((TEMPLATES / f"{family.name}.jinja").read_text("utf-8"), family.special)


_TEXTS = ["def f(x):\n", "    y = x", "    return y", "the cat sat, and 12 don't"] * 9
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _trained(model: Any, pre: Any, decoder: Any, trainer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    tokenizer.train_from_iterator(_TEXTS, trainer)
    found = json.loads(tokenizer.to_str())
    found["added_tokens"] = [
        each for each in found["added_tokens"] if each["content"] not in _BYTES
    ]
    return Tokenizer.from_str(json.dumps(found))


def spaces(scheme: str, strip: int) -> Tokenizer:
    """As Llama 2's, Mistral's or Gemma's: `▁` for spaces, and bytes for unknown characters."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False),
        decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)]),
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<unk>", "<s>", *_BYTES],
            max_token_length=4,
            show_progress=False,
        ),
    )


def byte_level(*, prefix: bool) -> Tokenizer:
    return _trained(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix),
        decoders.ByteLevel(),
        trainers.BpeTrainer(
            vocab_size=300,
            max_token_length=4,
            special_tokens=["<unk>", "<s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )


def unigram() -> Tokenizer:
    return _trained(
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
        ),
    )


def word_piece() -> Tokenizer:
    return _trained(
        models.WordPiece(unk_token="<unk>"),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=False),
        trainers.WordPieceTrainer(
            vocab_size=80, special_tokens=["<unk>", "<s>"], show_progress=False
        ),
    )


TOKENIZER_FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "a space in front of the first word": lambda: spaces("first", 1),
    "a space in front of every part": lambda: spaces("always", 1),
    "no space in front": lambda: spaces("never", 0),
    "bytes": lambda: byte_level(prefix=False),
    "bytes behind a space": lambda: byte_level(prefix=True),
    "unigram": unigram,
    "pieces of words": word_piece,
}


def wrapped(plain: Tokenizer, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", **settings
    )


Run = Callable[..., tuple[int, str, str]]


def write_yaml(path: Path, values: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return str(path)


def succeeded(run: Run, *words: Any) -> str:
    """A command ends with 0. -> its stdout."""
    code, out, err = run(*words)
    assert code == 0, err
    return out


def sets(**values: Any) -> list[str]:
    """Options of a command that set these keys."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def refused(run: Run, *words: Any) -> str:
    """A command refuses its arguments. -> its only line on stderr."""
    code, out, err = run(*words)
    assert (code, out) == (2, ""), err
    return one_line(err)


_PROGRESS = re.compile(r"starting|[a-z ()]+ \d+%.*")


def one_line(err: str) -> str:
    """The only line on stderr, which is Paceline's own; beside progress, on a slow machine."""
    lines = [line for line in err.strip().splitlines() if not _PROGRESS.fullmatch(line)]
    assert len(lines) == 1, err
    assert lines[0].startswith("paceline: ")
    return lines[0]
