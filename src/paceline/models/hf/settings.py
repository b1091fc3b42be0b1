"""Settings of generation_config.json: those that Paceline applies, and a warning about the others.

Settings that Paceline's own sampling settings replace (temperature, top_k, top_p, do_sample,
max_length) are neither applied nor named.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

from transformers import GenerationConfig

from paceline.errors import ModelLoadError, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# settings that are applied, that Paceline's own replace, or that change no text
_APPLIED = {
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "suppress_tokens"),
    *("use_cache", "cache_implementation", "remove_invalid_values", "renormalize_logits"),
    *("length_penalty", "early_stopping", "transformers_version", "_from_model_config"),
}
_OF_DRAFTS_AND_RESULTS = ("assistant_", "num_assistant_", "prompt_lookup_", "output_", "return_")


def banned_tokens(
    generation: GenerationConfig | None, eos_token_ids: Sequence[int], num_rows: int
) -> list[int]:
    """Tokens below `num_rows` that `generate` never emits.

    These are `suppress_tokens`, and `bad_words_ids` of one token. As in transformers,
    `bad_words_ids` cannot ban an end of text.
    """
    words = getattr(generation, "bad_words_ids", None) or ()
    banned = {word[0] for word in words if len(word) == 1} - set(eos_token_ids)
    banned |= set(getattr(generation, "suppress_tokens", None) or ())
    whole = {token for token in banned if isinstance(token, int)}
    return sorted(token for token in whole if 0 <= token < num_rows)


def forced_eos(generation: GenerationConfig | None, num_rows: int) -> int | None:
    """`forced_eos_token_id`, if it is one token below `num_rows`."""
    found = getattr(generation, "forced_eos_token_id", None)
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, int) and 0 <= found < num_rows else None


def refuse_malformed(hf: PreTrainedModel) -> None:
    """Raise a ModelLoadError if a setting is no list of token ids."""
    wanted = {
        "eos_token_id": ("a token id or a list of them", 1),
        "suppress_tokens": ("a list of token ids", 1),
        "begin_suppress_tokens": ("a list of token ids", 1),
        "bad_words_ids": ("a list of lists of token ids", 2),
    }
    for name, (what, depth) in wanted.items():
        found = getattr(hf.generation_config, name, None)
        is_one = name == "eos_token_id" and isinstance(found, int)
        if found is not None and not is_one and not _are_ids(found, depth):
            raise ModelLoadError(
                f"the generation config of this {hf.config.model_type} has {name}={found!r}, "
                f"wanted {what}; correct generation_config.json"
            )


def _are_ids(found: Any, depth: int) -> bool:
    if depth == 0:
        return isinstance(found, int)
    is_list = isinstance(found, (list, tuple))
    return is_list and all(_are_ids(each, depth - 1) for each in cast("Any", found))


def unused_settings(hf: PreTrainedModel) -> dict[str, Any]:
    """Settings of the generation config that Paceline does not apply."""
    generation = hf.generation_config
    if generation is None:
        return {}
    neutral = GenerationConfig._get_default_generation_params()
    given = {
        name: value
        for name, value in generation.to_diff_dict().items()
        if name not in _APPLIED and value and value != neutral.get(name)
    }
    # banned tokens are applied, longer sequences are not
    if not any(len(each) > 1 for each in given.get("bad_words_ids", ())):
        given.pop("bad_words_ids", None)
    if forced_eos(generation, _num_rows(hf)) is not None:
        given.pop("forced_eos_token_id", None)
    if hf.config.is_encoder_decoder:
        given.pop("forced_bos_token_id", None)  # it is in the decoder prompt
    return given


def warn_of_unused(hf: PreTrainedModel, stacklevel: int) -> None:
    """Warn once about settings that are not applied and that change texts."""
    unused = {
        name: value
        for name, value in unused_settings(hf).items()
        if not name.startswith(_OF_DRAFTS_AND_RESULTS)
    }
    if not unused:
        return
    advice = ""
    if "repetition_penalty" in unused:
        advice = f"; sampling.repetition_penalty={unused['repetition_penalty']} applies the penalty"
    shown = {name: " ".join(repr(value).split()) for name, value in unused.items()}
    named = ", ".join(f"{name}={shorten(value, 80)}" for name, value in shown.items())
    warnings.warn(
        f"the generation config of this {hf.config.model_type} sets {named}; Paceline does not "
        f"apply these settings, so texts may differ from those of generate(){advice}",
        stacklevel=stacklevel + 1,
    )


def warn_of_ends(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Sequence[int],
    vocab_size: int,
    stacklevel: int,
) -> None:
    """Warn if no stop token can be written, or if the tokenizer's end of text is none of them.

    Also warn if the tokenizer of a decoder-only model puts one behind every text, prompts too.

    `ends`: the stop tokens; `vocab_size`: that of the model and its tokenizer.
    """
    own, text = getattr(tokenizer, "eos_token_id", None), ""
    listed = f"this {hf.config.model_type} has eos_token_id {', '.join(map(str, ends))}"
    if ends and min(ends) >= vocab_size:
        text = (
            f"{listed}, but only the {vocab_size:,} tokens that its tokenizer and its logits share "
            "are written, so texts will not end before their limit; correct generation_config.json "
            "or the tokenizer files"
        )
    elif isinstance(own, int) and own < vocab_size and own not in ends:
        text = (
            f"{listed}, and its tokenizer the end of text {own}: texts go on behind {own}, as in "
            f"generate(), while vLLM ends them there; if it is right, add {own} to eos_token_id in "
            "generation_config.json"
        )
    if text:
        warnings.warn(text, stacklevel=stacklevel + 1)
    if tokenizer is None or hf.config.is_encoder_decoder:
        return
    with_end, without = (
        cast("list[int]", tokenizer("a", add_special_tokens=special)["input_ids"])[-1:]
        for special in (True, False)
    )
    if with_end != without and {*with_end} & {*ends, own}:
        warnings.warn(
            f"the tokenizer of this {hf.config.model_type} puts an end of text, {with_end[0]}, "
            "behind every prompt, so texts go on after their end; set add_eos_token to false in "
            "tokenizer_config.json, or remove it from the post_processor in tokenizer.json",
            stacklevel=stacklevel + 1,
        )


def _num_rows(hf: PreTrainedModel) -> int:
    head: Any = hf.get_output_embeddings()
    return len(head.weight)
