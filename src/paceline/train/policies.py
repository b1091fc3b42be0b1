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
    from collections.abc import Iterable, Sequence

    from paceline.train.objectives import Objective


class Policies:
    """Of the terms that are TVD++; the others have none."""

    def __init__(self, terms: Sequence[Objective], rng: torch.Generator | None) -> None:
        self._terms = terms
        self._rng = rng
        self._moments: list[RewardMoments | None] = [None] * len(terms)
        self._drawn: list[list[Tensor]] = [[] for _ in terms]

    @torch.no_grad()
    def look_at(self, chunks: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """Go through the batch once: log-probabilities of target and draft, [C, V] each."""
        mine = [(i, term) for i, term in enumerate(self._terms) if isinstance(term, TVDPlusPlus)]
        if not mine:
            return
        for target_log_probs_CV, draft_log_probs_CV in chunks:
            assert target_log_probs_CV is not None, "TVD++ compares with a target"
            for index, term in mine:
                drawn_CK = None
                if term.estimator == "sampled":
                    drawn_CK = self._draw(draft_log_probs_CV, term.num_samples)
                    self._drawn[index].append(drawn_CK)
                given = target_log_probs_CV, draft_log_probs_CV, term.estimator, drawn_CK
                here, before = reward_moments(*given), self._moments[index]
                self._moments[index] = here if before is None else before.plus(here)

    def of(self, rows: slice) -> list[Policy | None]:
        """Each term's, at these positions of the batch."""
        return [
            None if moments is None else Policy(moments, torch.cat(drawn)[rows] if drawn else None)
            for moments, drawn in zip(self._moments, self._drawn, strict=True)
        ]

    def _draw(self, log_probs_CV: Tensor, count: int) -> Tensor:
        assert self._rng is not None, "a plan with TVD++ brings its generator"
        uniforms_CK = torch.rand(
            len(log_probs_CV), count, generator=self._rng, dtype=torch.float64
        ).to(log_probs_CV.device)
        probs_CV = log_probs_CV.exp()
        return torch.stack([sample(probs_CV, uniforms_C) for uniforms_C in uniforms_CK.T], -1)
