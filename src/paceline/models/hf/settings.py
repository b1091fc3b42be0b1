"""Settings of generation_config.json: those that Paceline applies, and a warning about the others.

Settings that Paceline's own sampling settings replace (temperature, top_k, top_p, do_sample,
max_length) are neither applied nor named.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from paceline.errors import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

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
    head: Any = hf.get_output_embeddings()
    if forced_eos(generation, len(head.weight)) is not None:
        given.pop("forced_eos_token_id", None)
    if hf.config.is_encoder_decoder:
        given.pop("forced_bos_token_id", None)  # it is in the decoder prompt
    return given


def warn_of_unused(hf: PreTrainedModel, stacklevel: int) -> None:
    """Warn once about settings that are not applied and that change texts."""
    named = [
        f"{name}={shorten(' '.join(repr(value).split()), 80)}"
        for name, value in unused_settings(hf).items()
        if not name.startswith(_OF_DRAFTS_AND_RESULTS)
    ]
    if named:
        warnings.warn(
            f"the generation config of this {hf.config.model_type} sets {', '.join(named)}; "
            "Paceline does not apply these settings, so texts may differ from those of generate()",
            stacklevel=stacklevel + 1,
        )
