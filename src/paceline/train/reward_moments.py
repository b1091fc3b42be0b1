"""Computes the token draws and reward moments of a batch for TVD++, before its loss.

Both need a pass over the whole batch.
"""

# C tokens of a chunk, K drawn tokens per position, N trained positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.sampling import sample
from paceline.core.tvd_plus_plus import RewardMoments, reward_moments
from paceline.train.objectives import Policy, TVDPlusPlus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.train.objectives import Objective

    AddUp = Callable[[Tensor], Tensor]


def uniforms_of_terms(
    terms: Sequence[Objective], rows: Sequence[tuple[torch.Generator, int]]
) -> list[Tensor | None]:
    """Uniforms for each term's draws, [N, K]; None for terms that draw none.

    `rows` has a generator and the number of trained positions per row, so that a row's draws do
    not depend on other rows.
    """
    counts = [_num_drawn(term) for term in terms]
    drawn = [
        [torch.rand(length, count, generator=rng, dtype=torch.float64) for count in counts if count]
        for rng, length in rows
    ]
    columns = iter([torch.cat(parts) for parts in zip(*drawn, strict=True)])
    return [next(columns) if count else None for count in counts]


def _num_drawn(term: Objective) -> int:
    if isinstance(term, TVDPlusPlus) and term.estimator == "sampled":
        return term.num_samples
    return 0


def draws_tokens(terms: Sequence[Objective]) -> bool:
    """True if any term draws tokens."""
    return any(map(_num_drawn, terms))


def normalises_rewards(terms: Sequence[Objective]) -> bool:
    """True if a term normalises its rewards over the positions that are computed together."""
    return any(isinstance(term, TVDPlusPlus) for term in terms)


class Policies:
    """Inputs of the TVD++ terms; other terms have none."""

    def __init__(
        self, terms: Sequence[Objective], uniforms: Sequence[Tensor | None], add_up: AddUp
    ) -> None:
        # add_up sums a tensor over all processes
        self._terms = terms
        self._uniforms = uniforms
        self._add_up = add_up
        self._moments: list[RewardMoments | None] = [None] * len(terms)
        self._drawn: list[list[Tensor]] = [[] for _ in terms]

    @torch.no_grad()
    def look_at(self, chunks: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """Process the batch, in order: log-probabilities of target and draft, [C, V] each."""
        ours = [i for i, term in enumerate(self._terms) if isinstance(term, TVDPlusPlus)]
        if not ours:
            return
        start = 0
        for target_log_probs_CV, draft_log_probs_CV in chunks:
            assert target_log_probs_CV is not None, "TVD++ needs a target"
            rows = slice(start, start + len(draft_log_probs_CV))
            for index in ours:
                self._add_chunk(index, rows, target_log_probs_CV, draft_log_probs_CV)
            start = rows.stop
        for index in ours:
            moments = self._moments[index]
            assert moments is not None, "a batch has positions"
            self._moments[index] = RewardMoments(*self._add_up(torch.stack(moments)))

    def _add_chunk(self, index: int, rows: slice, target: Tensor, draft: Tensor) -> None:
        term, uniforms_NK = self._terms[index], self._uniforms[index]
        assert isinstance(term, TVDPlusPlus)
        drawn_CK = None
        if uniforms_NK is not None:
            drawn_CK = _draw(draft, uniforms_NK[rows])
            self._drawn[index].append(drawn_CK)
        moments = reward_moments(target, draft, term.estimator, drawn_CK)
        sums = self._moments[index]
        self._moments[index] = moments if sums is None else sums.plus(moments)

    def of(self, rows: slice) -> list[Policy | None]:
        """Inputs of each term at these positions of the batch."""
        return [
            None if moments is None else Policy(moments, torch.cat(drawn)[rows] if drawn else None)
            for moments, drawn in zip(self._moments, self._drawn, strict=True)
        ]


def _draw(log_probs_CV: Tensor, uniforms_CK: Tensor) -> Tensor:
    probs_CV, uniforms_CK = log_probs_CV.exp(), uniforms_CK.to(log_probs_CV.device)
    return torch.stack([sample(probs_CV, uniforms_C) for uniforms_C in uniforms_CK.T], -1)
