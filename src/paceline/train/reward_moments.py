"""What TVD++ needs to know of a whole batch before its first loss: draws, and moments of all rewards."""

# C tokens of a chunk, K drawn tokens of each, N trained positions, V vocabulary
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
    """What each term draws its tokens by: [N, K], or None where it draws none.

    `rows`: each row's own generator and how many of its positions are trained, so that a row's
    draws do not depend on the rows beside it.
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
    """Whether any of them does."""
    return any(map(_num_drawn, terms))


class Policies:
    """Of the terms that are TVD++; the others have none."""

    def __init__(
        self, terms: Sequence[Objective], uniforms: Sequence[Tensor | None], add_up: AddUp
    ) -> None:
        """`uniforms` are those of `uniforms_of_terms`; `add_up` sums a tensor over all processes."""
        self._terms = terms
        self._uniforms = uniforms
        self._add_up = add_up
        self._moments: list[RewardMoments | None] = [None] * len(terms)
        self._drawn: list[list[Tensor]] = [[] for _ in terms]

    @torch.no_grad()
    def look_at(self, chunks: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """Go through the batch once, in order: log-probabilities of target and draft, [C, V] each."""
        mine = [i for i, term in enumerate(self._terms) if isinstance(term, TVDPlusPlus)]
        if not mine:
            return
        start = 0
        for target_log_probs_CV, draft_log_probs_CV in chunks:
            assert target_log_probs_CV is not None, "TVD++ compares with a target"
            rows = slice(start, start + len(draft_log_probs_CV))
            for index in mine:
                self._look(index, rows, target_log_probs_CV, draft_log_probs_CV)
            start = rows.stop
        for index in mine:
            moments = self._moments[index]
            assert moments is not None, "a batch has positions"
            self._moments[index] = RewardMoments(*self._add_up(torch.stack(moments)))

    def _look(self, index: int, rows: slice, target: Tensor, draft: Tensor) -> None:
        term, uniforms_NK = self._terms[index], self._uniforms[index]
        assert isinstance(term, TVDPlusPlus)
        drawn_CK = None
        if uniforms_NK is not None:
            drawn_CK = _draw(draft, uniforms_NK[rows])
            self._drawn[index].append(drawn_CK)
        here = reward_moments(target, draft, term.estimator, drawn_CK)
        before = self._moments[index]
        self._moments[index] = here if before is None else before.plus(here)

    def of(self, rows: slice) -> list[Policy | None]:
        """Each term's, at these positions of the batch."""
        return [
            None if moments is None else Policy(moments, torch.cat(drawn)[rows] if drawn else None)
            for moments, drawn in zip(self._moments, self._drawn, strict=True)
        ]


def _draw(log_probs_CV: Tensor, uniforms_CK: Tensor) -> Tensor:
    probs_CV, uniforms_CK = log_probs_CV.exp(), uniforms_CK.to(log_probs_CV.device)
    return torch.stack([sample(probs_CV, uniforms_C) for uniforms_C in uniforms_CK.T], -1)
