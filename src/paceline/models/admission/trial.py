"""Plays a session and compares its logits with transformers' pass over each whole text.

The reference reads one text at a time, without a cache, padding or mask, so it shares nothing with
the session but the weights.

Shape suffixes: N new tokens, T text, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ModelLoadError, PacelineError, first_line
from paceline.models.hf.base import evaluating
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel

_LONGEST = 26  # tokens: beyond every window and scaling of a tiny twin
_UNLIMITED = 1 << 30
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
    *(TypeError, ValueError),
)
"""What models raise for a cache, mask or position that they do not support."""


@dataclass
class Comparison:
    """The largest difference so far.

    Attributes:
        largest: In standard deviations of the reference's logits; NaN counts as infinite.
        where: The step with the largest difference, in words.
        num_positions: Compared positions.
        allowed_V: Tokens that the session may emit; the others have to be -inf. None: not known,
            so those with -inf are ignored.
    """

    largest: float = 0.0
    where: str = ""
    num_positions: int = 0
    allowed_V: Tensor | None = None

    @classmethod
    def of(cls, model: HfModel) -> Comparison:
        """For sessions of this model, with its bans and its draft vocabulary."""
        allowed_V = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        if model.draft_vocabulary is not None:
            allowed_V.zero_()
            allowed_V[model.draft_vocabulary] = True
        if model.banned_K is not None:
            allowed_V[model.banned_K[model.banned_K < model.vocab_size]] = False
        return cls(allowed_V=allowed_V)

    def add(self, wanted_NV: Tensor, got_NV: Tensor, where: str) -> None:
        """Compare logits of the same positions."""
        got_NV = got_NV.to(wanted_NV.device)
        known = got_NV != -torch.inf
        allowed_V = self.allowed_V
        if allowed_V is not None and not torch.equal(known, allowed_V.expand_as(known)):
            self.largest, self.where = torch.inf, f"in the tokens that are possible, {where}"
            return
        differences = (wanted_NV - got_NV)[known].abs() / (wanted_NV.std() + 1e-6)
        worst = float(differences.max().nan_to_num(nan=torch.inf))
        self.num_positions += len(wanted_NV)
        if worst > self.largest:
            self.largest, self.where = worst, where


def fault_of(what: str, compare: Callable[[], Comparison], tolerance: float) -> str | None:
    """What is wrong with a pass, in words; None if a comparison stays within a tolerance."""
    try:
        found = compare()
    except (torch.OutOfMemoryError, PacelineError):
        raise
    except FAULTS as error:
        return f"failed ({first_line(error)})"
    if found.largest <= tolerance:
        return None
    return (
        f"gives {what} that differ from transformers by {found.largest:.2g} standard deviations "
        f"(allowed {tolerance:g}) {found.where}"
    ).rstrip()


@dataclass
class _Game:
    """A session, and the texts that its rows hold."""

    model: HfModel
    comparison: Comparison
    rng: torch.Generator
    texts: list[list[int]] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.model.start_session()
        self.longest = min(_LONGEST, self.model.max_length or _LONGEST)

    def prefill(self, lengths: Sequence[int]) -> None:
        prompts = [self.draw(length) for length in lengths]
        logits = self.session.prefill(prompts)
        self.texts, self.sources = map(list, zip(*map(self._row, prompts), strict=True))
        self._compare(logits[:, None], range(len(prompts)), "after the prompts")

    def extend(self, count: int) -> None:
        count = min(count, self.longest - max(map(len, self.texts)))
        if count < 1:
            return
        new = [self.draw(count) for _ in self.texts]
        logits = self.session.extend(torch.tensor(new))
        self.texts = [text + added for text, added in zip(self.texts, new, strict=True)]
        self._compare(logits, range(len(new)), f"after {count} more tokens")

    def rollback(self, counts: Sequence[int]) -> None:
        begin = len(self.model.decoder_prompt or ())
        counts = [min(n, len(text) - begin) for n, text in zip(counts, self.texts, strict=True)]
        self.session.rollback(counts)
        self.texts = [text[: len(text) - n] for text, n in zip(self.texts, counts, strict=True)]

    def refill(self, row: int, length: int) -> None:
        prompt = self.draw(length)
        logits = self.session.refill([row], [prompt])
        self.texts[row], self.sources[row] = self._row(prompt)
        self._compare(logits[:, None], [row], "after a row got another text")

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.session.keep_rows(rows)
        self.texts = [self.texts[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]

    def _row(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        start = self.model.decoder_prompt
        return (prompt, []) if start is None else (list(start), prompt)

    def draw(self, count: int) -> list[int]:
        """Tokens other than padding, which some models mask wherever it is."""
        table: Any = self.model.hf.get_input_embeddings()
        high = min(self.model.vocab_size, table.weight.shape[0])  # sources may have fewer tokens
        drawn = torch.randint(high, (min(count, self.longest),), generator=self.rng).tolist()
        padding = getattr(self.model.hf.config, "pad_token_id", None)
        return [(token + 1) % high if token == padding else token for token in drawn]

    def _compare(self, logits: Tensor, rows: Sequence[int], where: str) -> None:
        for row, got_NV in zip(rows, logits, strict=True):
            wanted_TV = plain_logits(self.model, self.texts[row], self.sources[row])
            self.comparison.add(wanted_TV[-len(got_NV) :], got_NV.float(), where)


@torch.inference_mode()
def plain_logits(model: HfModel, text: Sequence[int], source: Sequence[int]) -> Tensor:
    """Logits of transformers after each token of a text, without a cache, [T, V]."""
    start = model.decoder_prompt or ()
    batch = model.trial_batch(list(text)[len(start) :], source or (1,))
    with evaluating(model.hf):
        logits_TV = model.plain_logits(batch)[0, :, : model.vocab_size].float()
    if bool(logits_TV.isfinite().all()):
        return logits_TV
    dtype, path = str(model.dtype).removeprefix("torch."), model.hf.config._name_or_path
    raise ModelLoadError(
        f"the logits of this {model.hf.config.model_type} are NaN or infinite in {dtype}"
        f"{path and f' ({path})'}; load it in another dtype, or copy it again if its weights are "
        "damaged"
    )


def check_finite(
    models: Sequence[Any], texts: Sequence[tuple[Sequence[int], Sequence[int]]], *logits: Tensor
) -> None:
    """Raise a ModelLoadError if `plain_logits` are not finite in a text: prompt, and what follows.

    They are only computed if the largest of `logits` at a position is not finite, or without them.
    """
    if logits and all(bool(each.amax(-1).isfinite().all()) for each in logits):
        return
    for model, (prompt, tokens) in itertools.product(models, texts):
        start = model.decoder_prompt
        text, source = (prompt, ()) if start is None else (start, prompt)
        plain_logits(model, [*text, *tokens][: model.max_length], source)


@torch.inference_mode()
def play(model: HfModel) -> Comparison:
    """Compare a session's logits after ragged prompts, rollbacks, refills and removed rows.

    Raises what the model raises.
    """
    comparison = Comparison.of(model)
    game = _Game(model, comparison, named_generator(0, "trial of a session"))
    game.prefill([2, 11, 7])
    game.extend(3)
    game.rollback([1, 6, 0])
    game.extend(4)
    game.refill(0, 14)
    game.extend(1)
    game.keep_rows([2, 0])
    game.rollback([0, 9])
    game.extend(6)
    game.rollback([_UNLIMITED, 2])
    game.extend(5)
    return comparison


@torch.inference_mode()
def play_briefly(model: HfModel) -> Comparison:
    """Compare two short texts, for a model in full size. As `play`."""
    comparison = Comparison.of(model)
    game = _Game(model, comparison, named_generator(0, "brief trial of a session"))
    game.prefill([1, 3])
    game.extend(1)
    game.rollback([1, 0])
    game.extend(3)
    return comparison
