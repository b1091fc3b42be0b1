"""Does the export give what was exported? It is read back and compared before it is kept."""

# B texts, T positions, V vocabulary
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.config import StrictModel
from paceline.errors import ExportError
from paceline.export.export_inputs import SAMPLES
from paceline.models import load_model
from paceline.models.gguf import convert_gguf
from paceline.models.loading import load_tokenizer

if TYPE_CHECKING:
    from paceline.models import CausalModel

TOLERANCE = 1e-5
"""Of logits in float32, relative to the largest one."""
LEAST_AGREEMENT = 0.99
"""Fraction of positions where a GGUF file of 8 bits has to find the same token likeliest."""

_LENGTH = 96  # tokens of a text that are read
_NUM_RANDOM = 4  # more texts, of tokens drawn at random


class Checks(StrictModel):
    """What reading the export back showed.

    Attributes:
        num_positions: Positions that both models read.
        largest_difference: Between two logits, relative to the largest logit; only of tokens that the
            export may propose.
        agreement: Fraction of positions where both find the same token likeliest.
        num_texts: Texts that both tokenizers tokenize identically.
    """

    num_positions: int
    largest_difference: float
    agreement: float
    num_texts: int


class Reference:
    """What the model says of a few texts, before it is changed and written.

    Attributes:
        texts: Tokens [1, T] each.
        logits: Of each text, [T, V], V tokens that the tokenizer names.
    """

    def __init__(self, model: CausalModel) -> None:
        self.tokenizer: Any = model.tokenizer
        self.listed = model.draft_vocabulary
        self.texts = _texts(model)
        self.logits = [_logits(model.hf, text)[:, : model.vocab_size] for text in self.texts]


def check_directory(folder: Path, reference: Reference, *, baked: bool) -> Checks:
    """Read a directory back in float32 and compare it.

    Raises:
        ExportError: Logits differ by more than `TOLERANCE`, or the tokenizers tokenize a text differently.
    """
    found = load_model(folder, dtype="float32", device="cpu")
    checks = _compare(reference, found.hf, load_tokenizer(folder), baked=baked)
    _check_difference(checks)
    return checks


def check_gguf(
    file: Path, reference: Reference, rope: dict[str, Any], *, exact: bool, baked: bool
) -> Checks:
    """Read a GGUF file back by transformers and compare it.

    Args:
        file: It.
        reference: Of the model, its weights rounded as the file stores them where it is `exact`.
        rope: The model's rotary settings; transformers does not read a file's factors of angles.
        exact: Its type holds those weights without loss.
        baked: A draft vocabulary is baked into its head.

    Raises:
        ExportError: Logits differ, too few positions agree, or the tokenizers tokenize a text differently.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        convert_gguf(file, Path(scratch), torch.float32)
        path = Path(scratch) / "config.json"
        settings = json.loads(path.read_text("utf-8")) | {"rope_parameters": rope}
        path.write_text(json.dumps(settings), "utf-8")
        found = load_model(scratch, dtype="float32", device="cpu")
        checks = _compare(reference, found.hf, load_tokenizer(scratch), baked=baked)
    if exact:
        _check_difference(checks)
    elif checks.agreement < LEAST_AGREEMENT:
        raise ExportError(
            f"the file finds the same token likeliest in {checks.agreement:.1%} of {checks.num_positions} "
            f"positions, fewer than {LEAST_AGREEMENT:.0%}; nothing was kept. Its 8 bits per weight are too "
            "few for this model: choose bfloat16 or float16"
        )
    return checks


def _check_difference(checks: Checks) -> None:
    if checks.largest_difference > TOLERANCE:
        raise ExportError(
            f"the exported model's logits differ by {checks.largest_difference:.1e} of the largest, more "
            f"than {TOLERANCE:.0e}; nothing was kept. This architecture is not written as it is computed: "
            "report it, with the model's config.json"
        )


def _compare(reference: Reference, found: Any, tokenizer: Any, *, baked: bool) -> Checks:
    num_texts = _check_tokenizer(reference.tokenizer, tokenizer)
    num_positions = num_same = 0
    difference = largest = 0.0
    for tokens_1T, ours_TV in zip(reference.texts, reference.logits, strict=True):
        all_TV = _logits(found, tokens_1T)
        theirs_TV = all_TV[:, : ours_TV.shape[-1]]
        if baked:
            listed = reference.listed
            assert listed is not None, "only a list can be baked in"
            if not torch.isin(all_TV.argmax(-1), listed).all():
                raise ExportError(
                    "the exported head finds a token likeliest that the draft may not propose; nothing "
                    "was kept. Leave draft_vocabulary=bake out, and report it"
                )
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


def _check_tokenizer(ours: Any, theirs: Any) -> int:
    if ours is None:
        return 0
    for text in SAMPLES:
        wanted, found = (
            reader(text, add_special_tokens=False)["input_ids"] for reader in (ours, theirs)
        )
        if wanted != found:
            raise ExportError(
                f"the exported tokenizer tokenizes {text[:30]!r} differently; nothing was kept. Report it, "
                "with the tokenizer.json"
            )
    return len(SAMPLES)


def _texts(model: CausalModel) -> list[Tensor]:
    """Tokens of a few texts, and random ones, [1, T] each."""
    longest = min(_LENGTH, model.max_length or _LENGTH)
    rng = torch.Generator().manual_seed(0)
    random = torch.randint(model.vocab_size, (_NUM_RANDOM, 1, longest), generator=rng)
    tokenizer = model.tokenizer
    read = [] if tokenizer is None else [tokenizer(text)["input_ids"] for text in SAMPLES]
    return [*(torch.tensor([text[:longest]]) for text in read), *random]


@torch.inference_mode()
def _logits(hf: Any, tokens_1T: Tensor) -> Tensor:
    return hf(input_ids=tokens_1T, use_cache=False).logits[0].float()
