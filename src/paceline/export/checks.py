"""Does the export give what was exported? It is read back and compared before it is kept."""

# B texts, T positions, V vocabulary
from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.config import StrictModel
from paceline.errors import ExportError
from paceline.models import load_model
from paceline.models.gguf import convert_gguf
from paceline.models.loading import load_tokenizer

if TYPE_CHECKING:
    from paceline.models import CausalModel

TOLERANCE = 1e-5
"""Of logits in float32, as part of the largest one."""
LEAST_AGREEMENT = 0.99
"""Positions of which a GGUF file has to find the same token likeliest."""

_TEXTS = (
    'def mean(values):\n    """The arithmetic mean."""\n    return sum(values) / len(values)\n',
    "The quick brown fox didn't jump over 13 lazy dogs; it's 2026, and they've 1,234.5 reasons.",
    "  Whitespace\n\n\tand\r\nlines,   naïve café, Größe, нещо, 東京 🚀 … “quotes” -- ----\n",
)
_LENGTH = 96  # tokens of a text that are read
_NUM_RANDOM = 4  # more texts, of tokens drawn at random


class Checks(StrictModel):
    """What reading the export back showed.

    Attributes:
        num_positions: Positions that both models read.
        largest_difference: Between two logits, as part of the largest logit; only of tokens that the
            export may propose.
        agreement: Part of the positions where both find the same token likeliest.
        num_texts: Texts that both tokenizers cut alike.
    """

    num_positions: int
    largest_difference: float
    agreement: float
    num_texts: int


def check_directory(
    folder: Path, source: CausalModel, stored: torch.dtype, *, baked: bool
) -> Checks:
    """Read a directory back in float32 and compare it with the source, rounded as it was stored.

    Raises:
        ExportError: Logits differ by more than `TOLERANCE`, or the tokenizers cut a text differently.
    """
    wanted = _rounded(source, str(stored).removeprefix("torch."))
    found = load_model(folder, dtype="float32", device="cpu")
    listed = source.draft_vocabulary if baked else None
    checks = _compare(wanted, found.hf, source, load_tokenizer(folder), listed)
    if checks.largest_difference > TOLERANCE:
        raise ExportError(
            f"the exported model's logits differ by {checks.largest_difference:.1e} of the largest, more "
            f"than {TOLERANCE:.0e}; nothing was kept. Its architecture is not stored as it is computed: "
            "report it, with the model's config.json"
        )
    if baked:
        _check_listed(found, source)
    return checks


def check_gguf(file: Path, source: CausalModel, *, stored: str) -> Checks:
    """Read a GGUF file back by transformers and compare it with the source, rounded as it was stored.

    q8_0 is compared with the source itself.

    Raises:
        ExportError: Too few positions agree, or the tokenizers cut a text differently.
    """
    with tempfile.TemporaryDirectory() as scratch:
        convert_gguf(file, Path(scratch))
        found = load_model(scratch, dtype="float32", device="cpu")
        tokenizer = load_tokenizer(scratch)
        checks = _compare(_rounded(source, stored), found.hf, source, tokenizer, None)
    if checks.agreement < LEAST_AGREEMENT:
        raise ExportError(
            f"the file finds the same token likeliest in {checks.agreement:.1%} of {checks.num_positions} "
            f"positions, fewer than {LEAST_AGREEMENT:.0%}; nothing was kept. Choose a type that rounds "
            f"less than {stored}: bfloat16, float16 or float32"
        )
    return checks


def _rounded(source: CausalModel, stored: str) -> Any:
    """The source in float32, its weights as a type of this name holds them."""
    if stored in ("float32", "q8_0"):
        return source.hf
    return copy.deepcopy(source.hf).to(getattr(torch, stored)).float()  # pyright: ignore


def _compare(
    wanted: Any, found: Any, source: CausalModel, tokenizer: Any, listed: Tensor | None
) -> Checks:
    num_texts = _check_tokenizer(source.tokenizer, tokenizer)
    num_positions = num_same = 0
    difference = largest = 0.0
    for tokens_1T in _texts(source):
        ours_TV, theirs_TV = (
            _logits(hf, tokens_1T)[:, : source.vocab_size] for hf in (wanted, found)
        )
        if listed is not None:
            ours_TV, theirs_TV = ours_TV[:, listed], theirs_TV[:, listed]
        difference = max(difference, float((ours_TV - theirs_TV).abs().max()))
        largest = max(largest, float(ours_TV.abs().max()))
        num_positions += len(ours_TV)
        num_same += int((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).sum())
    return Checks(
        num_positions=num_positions,
        largest_difference=difference / largest,
        agreement=num_same / num_positions,
        num_texts=num_texts,
    )


def _check_listed(found: CausalModel, source: CausalModel) -> None:
    """Is the likeliest token always one of the draft vocabulary?"""
    assert source.draft_vocabulary is not None, "only a list can be baked in"
    for tokens_1T in _texts(source):
        best_T = _logits(found.hf, tokens_1T).argmax(-1)
        if not torch.isin(best_T, source.draft_vocabulary).all():
            raise ExportError(
                "the exported head finds a token likeliest that the draft may not propose; nothing was "
                "kept. Leave draft_vocabulary=bake out, and report it"
            )


def _check_tokenizer(ours: Any, theirs: Any) -> int:
    if ours is None:
        return 0
    for text in _TEXTS:
        wanted, found = ours(text)["input_ids"], theirs(text)["input_ids"]
        if wanted != found:
            raise ExportError(
                f"the exported tokenizer cuts {text[:30]!r} into {len(found)} other tokens; nothing was "
                "kept. Report it, with the tokenizer.json"
            )
    return len(_TEXTS)


def _texts(source: CausalModel) -> list[Tensor]:
    """Tokens of a few texts and of none, [1, T] each."""
    longest = min(_LENGTH, source.max_length or _LENGTH)
    rng = torch.Generator().manual_seed(0)
    random = torch.randint(source.vocab_size, (_NUM_RANDOM, 1, longest), generator=rng)
    texts = (
        [] if source.tokenizer is None else [source.tokenizer(text)["input_ids"] for text in _TEXTS]
    )
    return [*(torch.tensor([text[:longest]]) for text in texts), *random]


@torch.inference_mode()
def _logits(hf: Any, tokens_1T: Tensor) -> Tensor:
    return hf(input_ids=tokens_1T, use_cache=False).logits[0].float()
