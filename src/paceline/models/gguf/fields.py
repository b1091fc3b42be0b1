"""Keys and tensors of a GGUF file, with a record of those that were read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError, shorten
from paceline.models.checkpoint_files import Size

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFReader, ReaderTensor

_ADVICE = "use the model's safetensors directory instead"
# Keys that change nothing if they are 0, or 0 or 1, or 1; of an architecture.
_ZERO = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"),
    *("attn_logit_softcapping", "expert_count", "expert_feed_forward_length"),
    *("expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count"),
    *("final_logit_softcapping", "leading_dense_block_count", "nextn_predict_layers"),
    "rope.scaling.yarn_log_multiplier",
)
_ZERO_OR_ONE = (
    *("embedding_scale", "expert_group_count", "expert_group_used_count", "expert_weights_scale"),
    *("logit_scale", "residual_scale", "rope.scaling.alpha"),
)
_ONE = ("attention.causal", "rope.scaling.yarn_ext_factor")
_NEUTRAL = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_ZERO_OR_ONE, (0, 1)),
    **dict.fromkeys(_ONE, (1,)),
}
# Keys that change nothing, whatever their value; vocab_size is the number of rows of the embedding.
_IDLE = {"rope.scaling.finetuned", "tensor_data_layout", "vocab_size", "pooling_type"}
# Of tokenizers, for embeddings and classifiers, or already contained in what is read.
_IDLE |= {"tokenizer.huggingface.json", "tokenizer.rwkv.world"} | {
    f"tokenizer.ggml.{name}"
    for name in (
        *("token_type_count", "seperator_token_id", "mask_token_id", "cls_token_id"),
        *("add_sep_token", "precompiled_charsmap", "remove_extra_whitespaces"),
    )
}
_MOST_ENTRIES = 2_000_000  # keys, tensors and elements of arrays: each takes the reader 20 us


def checked_reader(path: Path) -> GGUFReader:
    """The reader of the package gguf, which believes every count, with checks of the counts.

    Raises:
        ValueError: There are more than `_MOST_ENTRIES` keys, tensors and elements of arrays, or one
            count of them or the tensors need more bytes than the file has.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        num_left = _MOST_ENTRIES

        def _take(self, count: Any) -> None:
            self.num_left -= int(count)
            if self.num_left < 0 or count > self.data.nbytes:
                raise ValueError(f"it has more than {_MOST_ENTRIES:,} entries, or fewer bytes")

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:  # its type in 4 bytes, its length in 8
                self._take(self._get(orig_offs + 4, "uint64")[0])
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_fields(self, offs: int, count: int) -> int:
            self._take(count)
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            self._take(count)
            return super()._build_tensor_info(offs, count)

    reader = Reader(path)
    if sum(each.n_bytes for each in reader.tensors) > reader.data.nbytes:
        raise ValueError("its tensors have more bytes than the file")
    return reader


class GgufFile:
    """A GGUF file, by the reader of the package gguf; `arch` is llama.cpp's name of it."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.reader = reader
        self.tensors: dict[str, ReaderTensor] = {each.name: each for each in reader.tensors}
        self._read: set[str] = set()
        self.arch = str(self.get("general.architecture", ""))
        kind = self.get("general.type", "model")
        if kind != "model":
            raise self.error(f"holds a {kind} (general.type), not a model", "name the model's file")
        if self.get("split.count", 0) > 1:
            raise self.error(
                f"is one of {self.get('split.count')} parts (split.count)",
                "join them with llama-gguf-split --merge first",
            )

    def size(self) -> Size:
        return Size(len(self.tensors), sum(each.n_elements for each in self.tensors.values()))

    def error(self, fault: str, advice: str = _ADVICE) -> ModelLoadError:
        """An error with the path of the file, what is wrong with it, and what to do."""
        return ModelLoadError(f"{self.path} {fault}; {advice}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        self._read.add(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture; of equal values for each layer, the value."""
        value = self.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.error(f"has different values of {self.arch}.{key} for its layers")
            return value[0]
        return value

    def required(self, key: str) -> Any:
        """The value of a key of the architecture that every file has."""
        value = self.own(key)
        if value is None:
            raise self.error(f"lacks the key {self.arch}.{key}")
        return value

    def refuse_unread(self) -> None:
        """Raise for a key that may change the computation or the tokens and that nobody read."""
        prefixes = f"{self.arch}.", "tokenizer."  # llama.cpp reads no other keys of a model
        for key, field in self.reader.fields.items():
            if key in self._read or not key.startswith(prefixes):
                continue
            name = key.removeprefix(f"{self.arch}.")
            if name in _IDLE or self._idle(name, field.contents()):
                continue
            found = shorten(repr(field.contents()), 40)
            raise self.error(f"has the key {key} = {found}, which is not supported")

    def _idle(self, name: str, value: Any) -> bool:
        if name == "attention.sliding_window" and isinstance(value, int):
            return value == 0 or value >= self.required("context_length")
        return any(_equal(value, each) for each in _NEUTRAL.get(name, ()))


def _equal(value: Any, neutral: Any) -> bool:
    if isinstance(value, list):
        return all(_equal(each, neutral) for each in value)
    return isinstance(value, (int, float)) and math.isclose(value, neutral)
