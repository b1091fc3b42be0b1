"""Model directory with the target's rows, tokenizer and context length; reads exports back."""

# V rows and vocabulary, D hidden width, K tokens of the draft vocabulary, T positions
from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from paceline.config import StrictModel
from paceline.engines.assisted import assisted_settings
from paceline.errors import ExportError, UsageError
from paceline.export.export_inputs import SAMPLES
from paceline.models import load_model
from paceline.models.checkpoint_files import auto_class, keep_cap
from paceline.models.drafts.save import tokenizer_files, write_model
from paceline.models.gguf.conversion import convert_gguf
from paceline.models.loading import LICENCES, load_tokenizer
from paceline.models.token_text import tokens_of
from paceline.places import copy_files

if TYPE_CHECKING:
    from paceline.export.export_inputs import Inputs
    from paceline.models import HfModel


_GENERATION = "generation_config.json"


def fit(inputs: Inputs) -> None:
    """Give a draft its target's number of embedding rows and context length, in place."""
    model, target = inputs.model, inputs.target
    only = model.draft_vocabulary if inputs.config.draft_vocabulary == "bake" else None
    if target is None:
        if only is not None:
            set_rows(model, model.head_weight.shape[0], only=only)
        return
    num_rows = target.hf.config.get_text_config(decoder=True).vocab_size
    set_rows(model, num_rows, only=only)
    config: Any = model.hf.config.get_text_config(decoder=True)
    rope, limit = getattr(config, "rope_parameters", None), target.max_length
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and limit is not None:
        # at the draft's limit, engines would stop or draft nonsense
        config.max_position_embeddings = max(config.max_position_embeddings, limit)


def write_directory(inputs: Inputs, gamma: int | None, folder: Path) -> None:
    """Write the model, its tokenizer and its generation config into an empty folder."""
    hf: Any = inputs.model.hf
    hf.to(inputs.stored)
    files = tokenizer_files(inputs.source)
    write_model(hf, inputs.model.draft_vocabulary, files, folder)
    _write_generation_config(inputs, gamma, folder)


def copy_licence(inputs: Inputs, folder: Path) -> None:
    """Copy the licence files of the target, or of the model if it is exported alone."""
    files = (path for pattern in LICENCES for path in inputs.directory.glob(pattern))
    copy_files(files, folder)


def _write_generation_config(inputs: Inputs, gamma: int | None, folder: Path) -> None:
    """Copy the target's; an engine may read the number of drafted tokens from it."""
    path = folder / _GENERATION
    if inputs.target is not None:
        copy_files([inputs.directory / _GENERATION], folder)
    if not inputs.config.kind.in_process or gamma is None:
        return
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    settings |= assisted_settings(gamma)
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def set_rows(model: HfModel, num_rows: int, *, only: Tensor | None = None) -> None:
    """Give embedding and head `num_rows` rows.

    New rows of the head, and values of its bias, are the mean of the others, so the logit of a new
    token is the mean of the other logits and never the largest.

    Args:
        model: Changed in place, as memory may not suffice for a copy.
        num_rows: At least the number of tokens in the tokenizer.
        only: Draft vocabulary, [K]. The head's rows of all other tokens become the mean of these
            rows, so greedy drafting never proposes them. The head is then no longer tied to the
            embedding.
    """
    if num_rows < model.vocab_size:
        raise UsageError(
            f"the target's config has vocab_size {num_rows}, but the tokenizer has "
            f"{model.vocab_size} tokens; use the files of one model"
        )
    hf: Any = model.hf
    head = hf.get_output_embeddings()
    if model.decoder_prompt is not None:
        if num_rows == head.weight.shape[0] and only is None:
            return
        raise UsageError(
            f"{hf.config.model_type} is an encoder-decoder, whose embeddings cannot be resized: it "
            f"has {head.weight.shape[0]} rows and the target {num_rows}; build the draft from the "
            "target, and leave draft_vocabulary=bake out"
        )
    tied = head.weight is hf.get_input_embeddings().weight
    known = min(num_rows, head.weight.shape[0], model.vocab_size)
    head_VD = _resized(head.weight, num_rows, known)
    bias_V = None if head.bias is None else _resized(head.bias, num_rows, known)
    if only is not None:
        head_VD = _limited_to(head_VD, only)
        bias_V = None if bias_V is None else _limited_to(bias_V, only)
    embedding, mask = hf.get_input_embeddings(), model.mask_token
    embedding_VD = _resized(embedding.weight, num_rows, known)
    if mask is not None:  # it may stand in the padding
        if mask >= num_rows:
            raise UsageError(
                f"the token of masks is {mask}, but the target has {num_rows} rows; train with "
                "parallel.mask_token set to one of them"
            )
        embedding_VD[mask] = embedding.weight.detach()[mask]
    embedding.weight = nn.Parameter(embedding_VD)
    embedding.num_embeddings = num_rows
    tied = tied and only is None
    head.weight = embedding.weight if tied else nn.Parameter(head_VD)
    head.bias = None if bias_V is None else nn.Parameter(bias_V)
    head.out_features = num_rows
    hf.vocab_size = num_rows
    text = hf.config.get_text_config(decoder=True)
    text.vocab_size = num_rows


def _resized(weight: Tensor, num_rows: int, known: int) -> Tensor:
    """The first `known` rows, followed by copies of their mean. [V, ...] -> [num_rows, ...]."""
    kept = weight.detach()[:known]
    mean = kept.float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([kept, mean.expand(num_rows - known, *kept.shape[1:])])


def _limited_to(weight: Tensor, tokens_K: Tensor) -> Tensor:
    mean = weight[tokens_K].float().mean(0).to(weight.dtype)
    limited = mean.expand_as(weight).clone()
    limited[tokens_K] = weight[tokens_K]
    return limited


TOLERANCE = 1e-5
"""Largest allowed difference of float32 logits, relative to the largest logit."""
LEAST_AGREEMENT = 0.99
"""Fraction of positions where an 8-bit GGUF file must have the same most likely token."""

_LENGTH = 96  # tokens per text, at most
_NUM_RANDOM = 4  # texts of random tokens

Reference: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""Texts, [1, T], and the original model's logits of them, [T, V] for the tokenizer's V tokens."""


class Checks(StrictModel):
    """Comparison of the export with the original model.

    Attributes:
        num_positions: Compared positions.
        largest_difference: Largest difference of two logits / the largest logit; with a baked draft
            vocabulary, over its tokens only.
        agreement: Fraction of positions with the same most likely token.
        stored: The 16-bit dtype in which the export was run once more; None: it was not.
        stored_agreement: `agreement` in that dtype, with the original model in float32.
    """

    num_positions: int
    largest_difference: float
    agreement: float
    stored: str | None = None
    stored_agreement: float | None = None


def reference_of(model: HfModel) -> Reference:
    """Logits of `SAMPLES` and of random texts."""
    longest = min(_LENGTH, model.max_length or _LENGTH)
    rng = torch.Generator().manual_seed(0)
    random = torch.randint(model.vocab_size, (_NUM_RANDOM, 1, longest), generator=rng)
    tokenizer: Any = model.tokenizer
    samples = [] if tokenizer is None else [tokenizer(text)["input_ids"] for text in SAMPLES]
    texts = [*(torch.tensor([ids[:longest]]) for ids in samples), *random]
    return [(text, _logits(model, text)[:, : model.vocab_size]) for text in texts]


def check_directory(inputs: Inputs, reference: Reference, folder: Path) -> Checks:
    """Read a model directory back in float32, and in its stored dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they name a scratch directory; the source gave them
        found = load_model(folder, dtype="float32", device="cpu")
        tokenizer = load_tokenizer(folder)
    checks = _compare(inputs, reference, found, tokenizer)
    _check_difference(checks)
    if inputs.stored != torch.float32:
        options = {"local_files_only": True, "trust_remote_code": False}
        auto = auto_class(AutoConfig.from_pretrained(folder, **options))
        hf = auto.from_pretrained(folder, dtype=inputs.stored, **options).eval()
        keep_cap(hf)
        again = _compare(inputs, reference, inputs.model.rewrap(hf), tokenizer)
        stored = {"stored": inputs.stored_name, "stored_agreement": again.agreement}
        checks = checks.model_copy(update=stored)
    return checks


def check_gguf(inputs: Inputs, reference: Reference, file: Path) -> Checks:
    """Read a GGUF file back; raises ExportError if logits or tokens differ.

    `reference` is that of the weights in the stored dtype, if the file stores them without loss.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        convert_gguf(file, Path(scratch), torch.float32)
        found = load_model(scratch, dtype="float32", device="cpu")
        checks = _compare(inputs, reference, found, load_tokenizer(scratch))
    if inputs.config.dtype != "q8_0":
        _check_difference(checks)
    elif checks.agreement < LEAST_AGREEMENT:
        raise ExportError(
            f"the file has the same most likely token in {checks.agreement:.1%} of "
            f"{checks.num_positions} positions, fewer than {LEAST_AGREEMENT:.0%}; nothing was "
            "kept. 8 bits per weight are too few for this model: choose bfloat16 or float16"
        )
    return checks


def _check_difference(checks: Checks) -> None:
    if checks.largest_difference > TOLERANCE:
        raise ExportError(
            f"logits of the exported model differ by {checks.largest_difference:.1e} of the "
            f"largest, more than {TOLERANCE:.0e}; nothing was kept. The export does not support "
            "this architecture correctly: report it, with the model's config.json"
        )


def _compare(inputs: Inputs, reference: Reference, found: HfModel, tokenizer: Any) -> Checks:
    ours = inputs.model.tokenizer
    if ours is not None:
        _check_tokenizer(ours, tokenizer)
    bakes = inputs.config.draft_vocabulary == "bake"
    listed = inputs.model.draft_vocabulary if bakes else None
    num_positions = num_same = 0
    difference = largest = 0.0
    for tokens_1T, ours_TV in reference:
        all_TV = _logits(found, tokens_1T)
        theirs_TV = all_TV[:, : ours_TV.shape[-1]]
        if not bool(all_TV.isfinite().all()):
            raise ExportError(
                f"run in {str(found.dtype).removeprefix('torch.')}, the exported model gives "
                "logits that are NaN or infinite; nothing was kept. Export it with another "
                "--dtype: bfloat16 has the range of float32"
            )
        if listed is not None:
            if not torch.isin(all_TV.argmax(-1), listed).all():
                raise ExportError(
                    "a token outside the draft vocabulary is most likely in the exported head; "
                    "nothing was kept. Leave draft_vocabulary=bake out, and report it"
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
    )


def _check_tokenizer(ours: Any, read: Any) -> None:
    for text in SAMPLES:
        if tokens_of(text, ours) != tokens_of(text, read):
            raise ExportError(
                f"the exported tokenizer tokenizes {text[:30]!r} differently; nothing was kept. "
                "Report it, with the tokenizer.json"
            )


@torch.inference_mode()
def _logits(model: HfModel, tokens_1T: Tensor) -> Tensor:
    tokens: list[int] = tokens_1T[0].tolist()
    return model.plain_logits(model.trial_batch(tokens, source=tokens))[0].float()
