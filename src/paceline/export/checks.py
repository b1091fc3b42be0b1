"""Read an export back, compare it with the original model, and serve it in its engine."""

# T positions, V vocabulary
from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.config import StrictModel
from paceline.core.sampling import SamplingParams
from paceline.engines.assisted import Transformers
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Drafting, Request, Setup
from paceline.engines.process import check_choice, started
from paceline.errors import ExportError
from paceline.export.export_inputs import SAMPLES
from paceline.models import load_model
from paceline.models.admission.tokenizer import TOKENIZER_FILE, TokenizerFile
from paceline.models.checkpoint_files import auto_class
from paceline.models.gguf.conversion import convert_gguf
from paceline.models.loading import load_tokenizer
from paceline.models.silence import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.engines.contract import Engine, Served
    from paceline.export.export_inputs import Inputs
    from paceline.models import HfModel
    from paceline.progress import Progress


TOLERANCE = 1e-5
"""Largest allowed difference of float32 logits, relative to the largest logit."""
LEAST_AGREEMENT = 0.99
"""Fraction of positions where an 8-bit GGUF file must have the same most likely token."""

_LENGTH = 96  # tokens per text, at most
_NUM_RANDOM = 4  # texts of random tokens
_NUM_TOKENS = 24
_TEXT = "The arithmetic mean of a list of numbers is"

Reference: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""Texts, [1, T], and the original model's logits of them, [T, V] for the tokenizer's V tokens."""


class Checks(StrictModel):
    """Comparison of the export with the original model.

    Attributes:
        num_positions: Compared positions.
        largest_difference: Largest difference of two logits / the largest logit; with a baked draft
            vocabulary, over its tokens only.
        agreement: Fraction of positions with the same most likely token.
        num_texts: Texts that both tokenizers tokenize identically.
        stored: The 16-bit dtype in which the export was run once more; None: it was not.
        stored_agreement: `agreement` in that dtype, with the original model in float32.
    """

    num_positions: int
    largest_difference: float
    agreement: float
    num_texts: int
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
    """Read a model directory back in float32, and in its stored dtype.

    Raises:
        ExportError: Logits or tokens differ, or logits are not finite.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they name a scratch directory; the source gave them
        found = load_model(folder, dtype="float32", device="cpu")
        tokenizer = load_tokenizer(folder)
    checks = _compare(inputs, reference, found, tokenizer)
    _check_difference(checks)
    if inputs.stored != torch.float32:
        options = {"local_files_only": True, "trust_remote_code": False}
        auto = auto_class(AutoConfig.from_pretrained(folder, **options))
        with quiet():
            hf = auto.from_pretrained(folder, dtype=inputs.stored, **options).eval()
        again = _compare(inputs, reference, inputs.model.rewrap(hf), tokenizer)
        stored = {"stored": inputs.stored_name, "stored_agreement": again.agreement}
        checks = checks.model_copy(update=stored)
    ours: Any = inputs.model.tokenizer
    if ours is None or not (folder / TOKENIZER_FILE).exists():
        return checks
    # engines read this file, and Paceline might read both tokenizers wrong in the same way
    plain = TokenizerFile(folder / TOKENIZER_FILE)
    texts = plain.probes(ours)
    _check_tokenizer(ours, plain.ids, texts)
    return checks.model_copy(update={"num_texts": checks.num_texts + len(texts)})


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
        _check_tokenizer(ours, lambda text: _ids(tokenizer, text), SAMPLES)
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
        num_texts=0 if ours is None else len(SAMPLES),
    )


def _check_tokenizer(ours: Any, read: Callable[[str], list[int]], texts: Iterable[str]) -> None:
    for text in texts:
        if _ids(ours, text) != read(text):
            raise ExportError(
                f"the exported tokenizer tokenizes {text[:30]!r} differently; nothing was kept. "
                "Report it, with the tokenizer.json"
            )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def _logits(model: HfModel, tokens_1T: Tensor) -> Tensor:
    tokens: list[int] = tokens_1T[0].tolist()
    return model.plain_logits(model.trial_batch(tokens, source=tokens))[0].float()


def check_in_engine(inputs: Inputs, path: Path, gamma: int, progress: Progress) -> str:
    """Load the export in its engine, serve one greedy request and return a one-line summary.

    Raises ExportError if the engine does not draft, EngineError if it does not start or answer.
    """
    config = inputs.config
    choice = config.engine or EngineChoice(engine=config.to)
    check_choice(choice)
    target = inputs.served_target
    prompt = inputs.tokenizer(_TEXT)["input_ids"]
    request = Request(prompt, _NUM_TOKENS, SamplingParams(temperature=0.0), 0)
    if choice.kind.in_process:
        engine = Transformers(load_model(target), load_model(path), gamma)
        return _summary(engine, engine.serve(request))
    length = len(prompt) + _NUM_TOKENS + gamma + 1
    setup = Setup(target, Drafting(str(path), gamma), length)
    with started(choice, setup, progress) as engine:
        return _summary(engine, engine.serve(request))


def _summary(engine: Engine, answer: Served) -> str:
    blocks = answer.blocks
    if blocks is None or not blocks.num_drafted:
        raise ExportError(
            f"{engine.name} {engine.version} loaded the export but drafted nothing with it; see "
            "the engine's log for the reason"
        )
    return (
        f"{engine.name} {engine.version} loads it: {blocks.num_accepted} of {blocks.num_drafted} "
        f"drafted tokens accepted in {len(answer.tokens)} tokens of greedy text"
    )
