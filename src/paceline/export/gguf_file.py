"""Write a model as a GGUF file for llama.cpp."""

# W width of a head
from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.environment import how_to_install
from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.gguf.architectures import ARCHITECTURES, PAIRS, ROPE_FACTORS
from paceline.models.gguf.conversion import open_gguf, rotated_by_pairs, tensor_names
from paceline.models.gguf.vocabulary import ENDS, name_of
from paceline.models.hf.architectures import context_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gguf import GGMLQuantizationType, GGUFWriter

    from paceline.models import HfModel

FAMILIES = {kind: family for family, known in ARCHITECTURES.items() for kind in known.written}
"""model_type -> llama.cpp's architecture."""

_BLOCK = 32  # weights per q8_0 block


def write_gguf(
    model: HfModel,
    path: Path,
    *,
    stored: str,
    tokenizer: Any,
    source: str,
    facts: Mapping[str, str | None],
) -> None:
    """Write a model and its tokenizer.

    Args:
        model: In float32.
        path: The file to create.
        stored: Type of the matrices: float32, float16, bfloat16 or q8_0; vectors are float32.
        tokenizer: The model's or its target's tokenizer.
        source: The path or hub name of the model of this tokenizer.
        facts: Values of `general.` keys; None: unknown.

    Raises:
        UsageError: The gguf package is missing.
        UnsupportedModelError: llama.cpp or this writer does not support the model.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"writing {path.name} needs the gguf package: {how_to_install('gguf')}")
    import gguf

    hf: Any = model.hf
    config = hf.config
    refuse_unknown(config)
    family = FAMILIES[config.model_type]
    writer = gguf.GGUFWriter(path, family)
    kind = gguf.GGMLQuantizationType[_TYPES[stored]]
    for key, value in facts.items():
        if value is not None:
            writer.add_string(f"general.{key}", value)
    file_type = f"{'ALL' if stored == 'float32' else 'MOSTLY'}_{_TYPES[stored]}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, config, family)
    if source.endswith(".gguf"):
        _copy_keys(writer, Path(source).expanduser())
    else:
        _add_tokenizer(writer, tokenizer, source, config.vocab_size, model.eos_token_ids)
    for label, weight in _tensors(hf, family):
        _add_tensor(writer, label, weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_ROPES = ("default", "linear", "llama3")
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def refuse_unknown(config: Any) -> None:
    """Raise an UnsupportedModelError if llama.cpp would compute otherwise than transformers."""
    # Llama applies no window, whatever its configuration says
    window = getattr(config, "sliding_window", None) or math.inf
    windowed = config.model_type != "llama" and getattr(config, "use_sliding_window", True)
    advice = _ALTERNATIVE
    if config.model_type not in FAMILIES:
        fault = f"{config.model_type} is none of the families supported as GGUF"
        fault += f" ({', '.join(FAMILIES)})"
    elif windowed and window < (context_length(config) or 0):
        fault = f"llama.cpp ignores the sliding window of {window} tokens in a {config.model_type}"
        advice = "serve it by vLLM or SGLang (--to vllm), or choose a draft without a window"
    elif (kind := config.rope_parameters.get("rope_type", "default")) not in _ROPES:
        fault = f"rotary positions with rope_type={kind} are not supported as GGUF"
    else:
        return
    raise UnsupportedModelError(f"{fault}; {advice}")


_ALTERNATIVE = (
    "export a directory (--to transformers) and convert it with llama.cpp's convert_hf_to_gguf.py"
)


def _add_sizes(writer: GGUFWriter, config: Any, family: str) -> None:
    sizes = {key: getattr(config, name) for key, name in ARCHITECTURES[family].keys.items()}
    sizes["context_length"] = context_length(config) or 0
    sizes["attention.head_count_kv"] = config.num_key_value_heads
    sizes["vocab_size"] = config.vocab_size
    names = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    sizes |= dict.fromkeys(names, head_width(config))
    for key, value in sizes.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{family}.{key}", value)
    _add_rope(writer, config.rope_parameters)


def _add_rope(writer: GGUFWriter, rope: Mapping[str, Any]) -> None:
    import gguf

    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _tensors(hf: Any, family: str) -> list[tuple[str, Tensor]]:
    """Weights in llama.cpp's layout, with llama.cpp's names."""
    config = hf.config
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    labels, known = tensor_names(hf, family), ARCHITECTURES[family]
    found: list[tuple[str, Tensor]] = []
    for name, weight in hf.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        label = next(iter(labels[name]), "")
        if not label or (label.endswith(".bias") and not label.endswith(known.biases)):
            raise UnsupportedModelError(
                f"{name} of this {config.model_type} has no name in a GGUF file; export a "
                "directory (--to transformers) and serve it with another engine"
            )
        if family in PAIRS:
            weight = rotated_by_pairs(name, weight, config)
        found.append((label, weight))
    if (factors := _rope_factors(hf)) is not None:
        found.append((ROPE_FACTORS, factors))
    return found


def _rope_factors(hf: Any) -> Tensor | None:
    """Divisors of the rotary angles for llama.cpp, [W / 2]; None but for Llama 3."""
    config = hf.config
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    width = head_width(config)
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = config.rope_parameters["rope_theta"] ** -steps
    return plain / hf.model.rotary_emb.inv_freq.float()


def _add_tensor(writer: GGUFWriter, label: str, weight: Tensor, kind: GGMLQuantizationType) -> None:
    import gguf

    data = weight.detach().to(torch.float32).contiguous().numpy()
    plain = gguf.GGMLQuantizationType.F32
    if data.ndim < 2:
        kind = plain
    elif kind == gguf.GGMLQuantizationType.Q8_0 and data.shape[-1] % _BLOCK:
        kind = gguf.GGMLQuantizationType.F16
    if kind != plain:
        data = gguf.quants.quantize(data, kind)
    writer.add_tensor(label, data, raw_dtype=kind)


_PREFIX = "tokenizer."
# Control tokens for llama.cpp's converter, too; DeepSeek uses wide bars.
_LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")


def _add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, source: str, num_rows: int, ends: Sequence[int]
) -> None:
    """Write the keys of a tokenizer with `num_rows` tokens; `ends` are those that end a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{source} has no tokenizer.json, which the GGUF export needs; {_OTHER_TOKENIZER}"
        )
    settings = json.loads(backend.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(settings, source))
    tokens, kinds = _tokens(tokenizer, settings, num_rows)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = settings["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    _add_roles(writer, tokenizer, num_rows)
    _add_ends(writer, tokenizer, tokens, ends)


_OTHER_TOKENIZER = (
    "convert the exported directory with llama.cpp's convert_hf_to_gguf.py, or give a GGUF target"
)


def _copy_keys(writer: GGUFWriter, path: Path) -> None:
    import gguf

    for field in open_gguf(path).reader.fields.values():
        if field.name.startswith(_PREFIX):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)


def _pre_tokenizer(settings: dict[str, Any], source: str) -> str:
    """llama.cpp's name of the pre-tokenizer of a byte-level BPE, derived from its settings.

    So a new vocabulary with a known pre-tokenizer is supported.
    """
    model, kind = settings["model"], (settings.get("normalizer") or {}).get("type", "NFC")
    others = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    name = None
    if model["type"] == "BPE" and kind == "NFC" and not any(model.get(each) for each in others):
        ignore_merges = bool(model.get("ignore_merges"))
        name = name_of(settings.get("pre_tokenizer"), ignore_merges=ignore_merges)
    if name is None:
        raise UnsupportedModelError(
            f"the tokenizer of {source} is not a byte-level BPE whose pre-tokenizer llama.cpp has "
            f"a name for; {_OTHER_TOKENIZER}"
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
    for add, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), left, strict=False):
        add(number)
