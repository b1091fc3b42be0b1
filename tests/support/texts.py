"""Chat templates and tokenizers of the families that users bring, and texts of the command line.

The templates in chat_templates/ are written after the public descriptions of these families. The
expected texts are written by hand: what the model writes stands between « and ».
"""

# ruff: noqa: E501, RUF001  # the tokens of DeepSeek have wide bars

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
    weather: str | tuple[str, ...] = ()
    messages: Sequence[Mapping[str, Any]] = tuple(TALK)
    arguments: Mapping[str, Any] = MappingProxyType({})


CHATML = "<|endoftext|> <|im_end|> <|im_start|>"
CHATML_TALK = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
    "\n«hello<|im_end|>»\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n"
    "«4 cats<|im_end|>»"
)
QWEN_WEATHER = (
    f"<|im_start|>system\nTools: {TOOLS}<|im_end|>\n<|im_start|>user\nrain?<|im_end|>\n"
    "<|im_start|>assistant\n«<think>\n\n</think>\n\n<tool_call>" + CALLED + "</tool_call>"
    "<|im_end|>»",
    f"<|im_start|>system\nTools: {TOOLS}<|im_end|>\n<|im_start|>user\nrain?<|im_end|>\n"
    "<|im_start|>assistant\n<tool_call>" + CALLED + "</tool_call><|im_end|>\n<|im_start|>user\n"
    "wet<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\ntake a coat<|im_end|>»",
)
CHAT_FAMILIES = [
    Family(
        "chatml",
        CHATML,
        "<|im_end|> <|endoftext|>",
        CHATML_TALK,
        f"<|im_start|>system\nTools: {TOOLS}<|im_end|>\n<|im_start|>user\nrain?<|im_end|>\n"
        f"<|im_start|>assistant\n«<tool_call>\n{CALLED}\n</tool_call><|im_end|>»\n<|im_start|>tool"
        "\nwet<|im_end|>\n<|im_start|>assistant\n«take a coat<|im_end|>»",
    ),
    Family(
        "llama2",
        "<s> </s>",
        "</s>",
        "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhi [/INST]« hello </s>»<s>[INST] sum? [/INST]"
        "« 4 cats </s>»",
    ),
    Family(
        "llama3",
        "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|end_of_text|>",
        "<|end_of_text|> <|eot_id|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n«hello<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nsum?"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«4 cats<|eot_id|>»",
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nFunctions: {TOOLS}\n\nrain?"
        '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«{"name": "weather", '
        '"parameters": {"city": "Oslo"}}<|eot_id|>»<|start_header_id|>ipython<|end_header_id|>\n\n'
        '"wet"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«take a coat<|eot_id|>»',
    ),
    Family(
        "llama4",
        "<|begin_of_text|> <|eot|> <|header_start|> <|header_end|> <|end_of_text|> <|eom|>",
        "<|end_of_text|> <|eom|> <|eot|>",
        "<|begin_of_text|><|header_start|>system<|header_end|>\n\nbe brief<|eot|><|header_start|>"
        "user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n«hello<|eot|>»"
        "<|header_start|>user<|header_end|>\n\nsum?<|eot|><|header_start|>assistant<|header_end|>"
        "\n\n«4 cats<|eot|>»",
        f"<|begin_of_text|><|header_start|>user<|header_end|>\n\nFunctions: {TOOLS}\n\nrain?<|eot|>"
        '<|header_start|>assistant<|header_end|>\n\n«{"name": "weather", "parameters": {"city": '
        '"Oslo"}}<|eot|>»<|header_start|>ipython<|header_end|>\n\nwet<|eot|><|header_start|>'
        "assistant<|header_end|>\n\n«take a coat<|eot|>»",
    ),
    Family(
        "mistral",
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
        "[TOOL_RESULTS] [/TOOL_RESULTS]",
        "</s>",
        (
            "<s>[INST] be brief\n\nhi[/INST]« hello</s>»",
            "<s>[INST] hi[/INST] hello</s>[INST] be brief\n\nsum?[/INST]« 4 cats</s>»",
        ),
        f"<s>[AVAILABLE_TOOLS] {TOOLS}[/AVAILABLE_TOOLS][INST] rain?[/INST]«[TOOL_CALLS] "
        '[{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call00001"}]</s>»'
        '[TOOL_RESULTS] {"content": "wet", "call_id": "call00001"}[/TOOL_RESULTS]'
        "« take a coat</s>»",
    ),
    Family(
        "gemma",
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        "<eos> <end_of_turn>",
        "<bos><start_of_turn>user\nbe brief\n\nhi<end_of_turn>\n<start_of_turn>model\n"
        "«hello<end_of_turn>»\n<start_of_turn>user\nsum?<end_of_turn>\n<start_of_turn>model\n"
        "«4 cats<end_of_turn>»",
    ),
    Family(
        "phi",
        "<s> <|endoftext|> <|end|> <|system|> <|user|> <|assistant|> <|tool_call|>",
        "<|endoftext|> <|assistant|> <|end|>",
        "<|system|>\nbe brief<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n«hello<|end|>»\n<|user|>"
        "\nsum?<|end|>\n<|assistant|>\n«4 cats<|end|>»",
        f"<|user|>\nrain?<|end|>\n<|assistant|>\n«<|tool_call|>{CALLED}<|/tool_call|><|end|>»\n"
        "<|tool|>\nwet<|end|>\n<|assistant|>\n«take a coat<|end|>»",
    ),
    Family(
        "qwq",
        CHATML,
        "<|im_end|> <|endoftext|>",
        (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\n<think>\n«greet\n</think>\n\nhello<|im_end|>»",
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\nhello<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n«add\n</think>\n\n4 cats<|im_end|>»",
        ),
        messages=THOUGHT,
    ),
    Family(
        "qwen3",
        CHATML,
        "<|im_end|> <|endoftext|>",
        (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\n«<think>\ngreet\n</think>\n\nhello<|im_end|>»",
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\nhello<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n"
            "«<think>\nadd\n</think>\n\n4 cats<|im_end|>»",
        ),
        QWEN_WEATHER,
        messages=THOUGHT,
    ),
    Family(
        "qwen3",
        CHATML,
        "<|im_end|> <|endoftext|>",
        (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\n<think>\n\n</think>\n\n«hello<|im_end|>»",
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>"
            "assistant\nhello<|im_end|>\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n«4 cats<|im_end|>»",
        ),
        arguments={"enable_thinking": False},
    ),
    Family(
        "deepseek_r1",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        (
            "<｜begin▁of▁sentence｜>be brief<｜User｜>hi<｜Assistant｜><think>\n«greet\n</think>\n\n"
            "hello<｜end▁of▁sentence｜>»",
            "<｜begin▁of▁sentence｜>be brief<｜User｜>hi<｜Assistant｜>\n\nhello<｜end▁of▁sentence｜>"
            "<｜User｜>sum?<｜Assistant｜><think>\n«add\n</think>\n\n4 cats<｜end▁of▁sentence｜>»",
        ),
        messages=THOUGHT,
    ),
    Family(
        "gpt_oss",
        "<|startoftext|> <|return|> <|start|> <|message|> <|end|> <|channel|> <|call|> "
        "<|endoftext|>",
        "<|return|> <|endoftext|> <|call|>",
        (
            "<|start|>system<|message|>You are a model.\nReasoning: high<|end|><|start|>developer"
            "<|message|>be brief<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>hello<|return|>»",
            "<|start|>system<|message|>You are a model.\nReasoning: high<|end|><|start|>developer"
            "<|message|>be brief<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
            "<|channel|>final<|message|>hello<|end|><|start|>user<|message|>sum?<|end|><|start|>"
            "assistant«<|channel|>final<|message|>4 cats<|return|>»",
        ),
        "<|start|>system<|message|>You are a model.\nReasoning: high<|end|><|start|>developer"
        f"<|message|>\n# Tools\n{TOOLS}<|end|><|start|>user<|message|>rain?<|end|><|start|>"
        "assistant« to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo"}<|call|>»<|start|>functions.weather to=assistant<|channel|>commentary'
        '<|message|>"wet"<|end|><|start|>assistant«<|channel|>final<|message|>take a coat'
        "<|return|>»",
        arguments={"reasoning_effort": "high"},
    ),
    Family(
        "granite",
        "<|end_of_text|> <|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>",
        "<|end_of_text|>",
        "<|start_of_role|>system<|end_of_role|>be brief<|end_of_text|>\n<|start_of_role|>user"
        "<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        "«hello<|end_of_text|>»\n<|start_of_role|>user<|end_of_role|>sum?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>«4 cats<|end_of_text|>»",
        "<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n<|start_of_role|>"
        "user<|end_of_role|>rain?<|end_of_text|>\n<|start_of_role|>tools<|end_of_role|>"
        f"{TOOLS}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>«<|tool_call|>[{CALLED}]"
        "<|end_of_text|>»\n<|start_of_role|>tool_response<|end_of_role|>wet<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>«take a coat<|end_of_text|>»",
    ),
    Family(
        "command_r",
        "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> "
        "<|CHATBOT_TOKEN|> <|START_ACTION|> <|END_ACTION|>",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>be brief<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>«hello<|END_OF_TURN_TOKEN|>»<|START_OF_TURN_TOKEN|><|USER_TOKEN|>sum?"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "«4 cats<|END_OF_TURN_TOKEN|>»",
        f"<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>rain?\n## Tools\n{TOOLS}"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«<|START_ACTION|>"
        f"[{CALLED}]<|END_ACTION|><|END_OF_TURN_TOKEN|>»<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>wet"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "«take a coat<|END_OF_TURN_TOKEN|>»",
    ),
    Family(
        "smollm3",
        CHATML,
        "<|im_end|>",
        "<|im_start|>system\nReasoning: /think\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
        "\n<|im_start|>assistant\n«hello<|im_end|>»\n<|im_start|>user\nsum?<|im_end|>\n<|im_start|>"
        "assistant\n«4 cats<|im_end|>»",
        f"<|im_start|>system\nReasoning: /think\n<tools>{TOOLS}</tools><|im_end|>\n<|im_start|>user"
        f"\nrain?<|im_end|>\n<|im_start|>assistant\n«<tool_call>{CALLED}</tool_call><|im_end|>»\n"
        "<|im_start|>user\nwet<|im_end|>\n<|im_start|>assistant\n«take a coat<|im_end|>»",
    ),
    Family(
        "smollm3",
        CHATML,
        "<|im_end|>",
        "<|im_start|>system\nReasoning: /no_think\nbe brief<|im_end|>\n<|im_start|>user\nhi"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n«hello<|im_end|>»\n<|im_start|>"
        "user\nsum?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n«4 cats<|im_end|>»",
        arguments={"enable_thinking": False},
    ),
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
