"""Texts and logits by transformers alone: generate(), and the pass without a cache.

No session, mask or position of Paceline takes part, so `verify` compares with them.

Shape suffixes: B batch, T text, N new tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from paceline.core.sampling import limited
from paceline.models.contract import Texts, pad
from paceline.models.hf.architectures import configured_prompt
from paceline.models.hf.base import evaluating

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.models.hf.base import HfModel

REFERENCE = f"generate() and the plain pass of transformers {transformers.__version__}"
_MOST_LOGITS = 1 << 26  # of a pass, 256 MB in float32


@torch.inference_mode()
def greedy_text(
    model: HfModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    repetition_penalty: float,
    vocab_size: int,
    forces_eos: bool,
) -> list[int]:
    """The new tokens of greedy generate() after a prompt, up to and with the stop token.

    Applies the settings of the generation config that Paceline applies, as transformers reads them,
    with this penalty in the place of its own. Tokens beyond `vocab_size` are not chosen.
    `forces_eos`: the last token is the `forced_eos_token_id`, if there is one.
    """
    hf: Any = model.hf
    inputs = _inputs(model, prompt)
    start = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 0
    given = len(model.decoder_prompt or ())
    # tokens of the decoder prompt that generate() forces count as new ones
    most = max_new_tokens + (given - max(start, 1) if given else 0)
    listed = model.draft_vocabulary

    def keep(_tokens: Tensor, scores: Tensor) -> Tensor:
        """As a logits processor: tokens beyond the vocabulary or the list are not chosen."""
        scores = scores.clone()
        scores[:, vocab_size:] = -torch.inf
        return scores if listed is None else limited(scores, listed)

    with evaluating(hf), _applied(model, repetition_penalty, forces_eos=forces_eos):
        (found,) = hf.generate(
            **inputs, max_new_tokens=most, do_sample=False, logits_processor=[keep]
        ).tolist()
    first = given or len(prompt)
    if given and tuple(found[:given]) != model.decoder_prompt:
        first = 1  # another text than that of a session, from its first token on
    text, stops = found[first:], set(model.eos_token_ids)
    return text[: next((n + 1 for n, token in enumerate(text) if token in stops), None)]


@torch.inference_mode()
def plain_text_logits(
    model: HfModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits before each token of each text, by a pass over prompt and text, float32 [T, V] each.

    -inf for tokens that sessions never emit.
    """
    contexts = [model.decoder_prompt or prompt for prompt in prompts]
    wholes = [[*context, *text] for context, text in zip(contexts, texts, strict=True)]
    found: list[Tensor] = []
    width = model.hf.get_output_embeddings().weight.shape[0]  # pyright: ignore
    size = max(1, _MOST_LOGITS // (max(map(len, wholes)) * width))
    for begin in range(0, len(wholes), size):
        rows = range(begin, min(begin + size, len(wholes)))
        batch = pad([wholes[row] for row in rows])
        if model.decoder_prompt is not None:
            source = pad([prompts[row] for row in rows]).to(model.device)
            batch = Texts(batch.tokens_BT, batch.attention_BT, source)
        with evaluating(model.hf):
            logits_BTV = model.plain_logits(batch.to(model.device))
        for logits_TV, row in zip(logits_BTV, rows, strict=True):
            first = len(contexts[row]) - 1
            kept_TV = logits_TV[first : first + len(texts[row])].float()
            if model.draft_vocabulary is not None:
                kept_TV = limited(kept_TV, model.draft_vocabulary)
            if model.banned_K is not None:
                kept_TV = kept_TV.index_fill(-1, model.banned_K, -torch.inf)
            found.append(kept_TV[:, : model.vocab_size].clone())
    return found


def _inputs(model: HfModel, prompt: Sequence[int]) -> dict[str, Tensor]:
    """Arguments of generate()."""
    text_1T = torch.tensor([prompt], device=model.device)
    found, hf = {"input_ids": text_1T, "attention_mask": torch.ones_like(text_1T)}, model.hf
    given = model.decoder_prompt
    if given is not None and given != configured_prompt(hf.config, hf.generation_config):
        found["decoder_input_ids"] = torch.tensor([given], device=model.device)
    return found


@contextlib.contextmanager
def _applied(model: HfModel, penalty: float, *, forces_eos: bool) -> Iterator[None]:
    """The model with a generation config of the settings that Paceline applies."""
    hf: Any = model.hf
    before = hf.generation_config
    config = GenerationConfig(
        repetition_penalty=penalty if penalty != 1 else None,
        eos_token_id=list(model.eos_token_ids) or None,
        pad_token_id=before.pad_token_id,
        suppress_tokens=before.suppress_tokens,
        bad_words_ids=[word for word in before.bad_words_ids or () if len(word) == 1] or None,
        decoder_start_token_id=before.decoder_start_token_id,
        forced_bos_token_id=before.forced_bos_token_id,  # in the decoder prompt, or refused
        forced_eos_token_id=model.forced_eos if forces_eos else None,
    )
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(model.eos_token_ids), 0)
    hf.generation_config = config
    try:
        yield
    finally:
        hf.generation_config = before
