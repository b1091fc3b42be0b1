"""Rules, backends and pairs of models that tests share, and the one test of distributions."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch

from paceline.core.backend import Backend, register, registered
from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    Rule,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.sampling import SamplingParams
from paceline.decode.decoder import Decoder
from paceline.native.kernels import NativeBackend
from support import exact
from support.fakes import TableModel

ALL_RULES: list[Rule] = [
    Lossless(),
    *(Lenient(kind, 0.4) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.3), Lossy(0.3, 0.8), Lossy(0.3, "tuned"), BiLDRule(1.5), Chow(0.6), ChowLog(2.0)),
    *(Diff(0.1), DiffLog(0.3), Opt(0.4), OptLog(0.5), TokenV1(0.2), TokenV2(0.2), TokenV3(0.6)),
]
CASCADES = {
    "bild": BiLDRule,
    "chow": Chow,
    "chow_log": ChowLog,
    "diff": Diff,
    "diff_log": DiffLog,
    "opt": Opt,
    "opt_log": OptLog,
    "token_v1": TokenV1,
    "token_v2": TokenV2,
    "token_v3": TokenV3,
}
# At these, each rule defers at some contexts of the statistical tests' pair and not at others.
THRESHOLDS = {
    "bild": 1.9,
    "chow": 0.52,
    "chow_log": 1.2,
    "diff": 0.05,
    "diff_log": 0.05,
    "opt": 0.2,
    "opt_log": 0.3,
    "token_v1": 0.3,
    "token_v2": 0.3,
    "token_v3": 0.5,
    "tuned": 0.4,
}


def stating(name: str, alpha: float) -> Rule:
    """The rule whose stated distribution is `exact.AIMS[name](alpha)`."""
    return Lossy(min(alpha, 0.95), "tuned") if name == "tuned" else CASCADES[name](alpha)


PYTORCH = Backend()
"""Leaves everything to PyTorch."""


class VerifiesInPyTorch(NativeBackend):
    """The C library for probabilities and drawing alone."""

    def verify_lossless(self, *_args: Any, **_named: Any) -> None:
        return None


VOCABULARY = 5
PROMPT = [3, 1]
ODDS = 1e-4


def table(order: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY**order, VOCABULARY, generator=generator, dtype=torch.float64)
    return (1.2 * logits).softmax(-1)


@cache
def exact_models(
    shaping: exact.Shaping, draft_shaping: exact.Shaping | None = None, order: int = 1
) -> exact.Models:
    """The target and the draft of a `Pair` as functions in Python floats."""
    penalty = shaping.repetition_penalty
    drawn = replace(draft_shaping or shaping, repetition_penalty=penalty)
    raw = exact.Shaping(repetition_penalty=penalty)
    target, draft = (table(order, seed).tolist() for seed in (1, 2))
    models = (target, shaping), (draft, drawn), (target, raw), (draft, raw)
    return exact.Models(*(exact.from_table(values, order, shaped) for values, shaped in models))


class Pair:
    """A target and a draft, as models and as functions in Python floats.

    `draft_shaping`: how the draft draws, but for the penalty (the target's); None: as the target.
    """

    def __init__(
        self,
        order: int,
        shaping: exact.Shaping | None = None,
        draft_shaping: exact.Shaping | None = None,
    ) -> None:
        self.order = order
        self.shaping = shaping or exact.Shaping()
        self._draft_shaping = draft_shaping
        self.target, self.draft = (TableModel(table(order, seed)) for seed in (1, 2))
        self.exact = exact_models(self.shaping, draft_shaping, order)
        self.p, self.q = self.exact[:2]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.model_validate(asdict(self.shaping))

    @property
    def draft_sampling(self) -> SamplingParams | None:
        if self._draft_shaping is None:
            return None
        return SamplingParams.model_validate(asdict(self._draft_shaping))

    def plain(self, gamma: int) -> dict[tuple[int, ...], float]:
        """What a text of `length(gamma)` tokens follows where nothing is lost."""
        return exact.plain_texts(self.p, tuple(PROMPT), length(gamma))

    def speculative(
        self, rule: exact.RuleVectors, gamma: int, mask: int | None = None
    ) -> dict[tuple[int, ...], float]:
        """What it follows under a rule; `mask`: of a parallel draft."""
        return exact.judged_texts(
            self.p,
            self.q,
            lambda text, read: rule(self.p(text), self.q(read)),
            gamma=gamma,
            prompt=tuple(PROMPT),
            length=length(gamma),
            mask=mask,
        )


def length(gamma: int) -> int:
    """Room for the prompt pass's own token and, behind it, a block all accepted with its bonus."""
    return max(4, gamma + 2)


def draw(decoder: Decoder, gamma: int, count: int) -> list[list[int]]:
    """Many texts, each from a seed of its own, in one batch."""
    found = decoder.generate([PROMPT] * count, length(gamma))
    return [generation.tokens for generation in found]


def smallest_p_value(
    texts: Sequence[Sequence[int]], expected: dict[tuple[int, ...], float]
) -> float:
    """Of all pairs of neighbouring places in the texts."""
    return min(exact.pair_p_values(texts, expected))


@contextmanager
def using(backend: Backend) -> Generator[None]:
    """Use this backend within a `with` block; `Backend()` selects PyTorch."""
    before = registered()
    register(backend)
    try:
        yield
    finally:
        register(before)
