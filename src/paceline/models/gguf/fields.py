"""Keys and tensors of a GGUF file, with a record of those that were read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError, shorten

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFReader, ReaderTensor

_ADVICE = "use the model's safetensors directory instead"
# Keys that change nothing if they have one of these values; of an architecture or a tokenizer.
_ZERO = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"),
    *("attn_logit_softcapping", "expert_count", "expert_feed_forward_length"),
    *("expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count"),
    *("final_logit_softcapping", "leading_dense_block_count", "nextn_predict_layers"),
    *("rope.scaling.yarn_log_multiplier", "tokenizer.ggml.add_space_prefix"),
)
_ZERO_OR_ONE = ("embedding_scale", "expert_weights_scale", "logit_scale", "residual_scale")
_ONE = ("attention.causal", "rope.scaling.yarn_ext_factor", "rope.scaling.attn_factor")
_NEUTRAL = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_ZERO_OR_ONE, (0, 1)),
    **dict.fromkeys(_ONE, (1,)),
    "rope.scaling.yarn_beta_fast": (32,),  # llama.cpp takes these, whatever the file says
    "rope.scaling.yarn_beta_slow": (1,),
}
# Keys that change nothing, whatever their value; vocab_size is the number of rows of the embedding.
_IDLE = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
_IDLE |= {"vocab_size", "tokenizer.huggingface.json"} | {
    f"tokenizer.ggml.{name}"
    for name in (
        *("pre", "merges", "scores"),  # of the other kind of tokenizer
        *("seperator_token_id", "mask_token_id", "cls_token_id", "add_sep_token"),
        *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        *("prefix_token_id", "suffix_token_id", "middle_token_id"),
    )
}


class GgufFile:
    """A GGUF file, by the reader of the package gguf; `arch` is llama.cpp's name of it."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.reader = reader
        self.tensors: dict[str, ReaderTensor] = {each.name: each for each in reader.tensors}
        self._read: set[str] = set()
        self.arch = str(self.get("general.architecture", ""))
        if self.get("split.count", 0) > 1:
            raise self.error(
                f"is one of {self.get('split.count')} parts (split.count)",
                "join them with llama-gguf-split --merge first",
            )

    def error(self, fault: str, advice: str = _ADVICE) -> ModelLoadError:
        """An error with the path of the file, what is wrong with it, and what to do."""
        return ModelLoadError(f"{self.path} {fault}; {advice}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        self._read.add(key)
        return default if field is None else field.contents()

    def needed(self, key: str) -> Any:
        """The value of a key that every file has."""
        value = self.get(key)
        if value is None:
            raise self.error(f"lacks the key {key}")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.get(f"{self.arch}.{key}", default)

    def required(self, key: str) -> Any:
        """The value of a key of the architecture that every file has."""
        return self.needed(f"{self.arch}.{key}")

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
    return isinstance(value, (int, float)) and math.isclose(value, neutral)
