"""A block's draft: all of it at once, or pass by pass for as long as the draft is sure.

Shape suffixes: B batch, G drafted, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.lists import as_list
from paceline.models.halves import Drawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.sampling import SamplingParams
    from paceline.models.session import ModelSession


class Drafting:
    """What a rule and a sampler ask of a draft's session.

    Args:
        session: The draft's.
        sampling: How its distributions are shaped.
        behind_last: Give the distribution behind the last drafted token, too.
        raw: Give untempered distributions, too.
    """

    def __init__(
        self, session: ModelSession, sampling: SamplingParams, *, behind_last: bool, raw: bool
    ) -> None:
        self._session = session
        self._sampling = sampling
        self._behind_last = behind_last
        self._raw = raw

    def whole(
        self,
        unread: Sequence[Sequence[int]],
        gamma: int,
        uniforms: Sequence[Sequence[float]] | None,
        seen_BV: Tensor | None,
    ) -> Drawn:
        """Read what is unread, and draft gamma tokens a row."""
        return self._session.draw(
            unread,
            gamma,
            self._sampling,
            uniforms,
            seen_BV,
            behind_last=self._behind_last,
            raw=self._raw,
        )

    def while_sure(
        self,
        unread: Sequence[Sequence[int]],
        wanted: Sequence[int],
        threshold: float,
        uniforms: Sequence[Sequence[float]] | None,
        seen_BV: Tensor | None,
    ) -> tuple[Drawn, list[int]]:
        """Draft until each row has what it wanted or stands before a token with max q < threshold.

        Returns: tokens of the longest draft, and how many of them each row means.
        """
        ends = list(wanted)
        seen_BV = None if seen_BV is None else seen_BV.clone()
        passes: list[Drawn] = []
        while len(passes) < max(ends):
            place = len(passes)
            column = None if uniforms is None else [[numbers[place]] for numbers in uniforms]
            one = self._session.draw(unread, 1, self._sampling, column, seen_BV, raw=True)
            passes.append(one)
            for row, sure in enumerate(_confidence(one)):
                if place < ends[row] and sure < threshold:
                    ends[row] = place
            if seen_BV is not None:
                seen_BV.scatter_(1, one.tokens_BG.to(seen_BV.device), value=True)
            unread = as_list(one.tokens_BG)
        length = max(ends)
        if self._behind_last and len(passes) == length:
            # Nobody stopped here: the pass that would tell how sure the draft is has not been made.
            passes.append(
                self._session.draw(
                    unread,
                    0,
                    self._sampling,
                    _nothing(uniforms),
                    seen_BV,
                    behind_last=True,
                    raw=True,
                )
            )
        return _joined(passes, length, length + self._behind_last), ends


def _confidence(drawn: Drawn) -> list[float]:
    probs_B1V = drawn.probs_BGV if drawn.raw_BGV is None else drawn.raw_BGV
    assert probs_B1V is not None, "only greedy drafts come without distributions, and those are raw"
    return as_list(probs_B1V[:, 0].amax(-1))


def _nothing(uniforms: Sequence[Sequence[float]] | None) -> list[list[float]] | None:
    return None if uniforms is None else [[] for _ in uniforms]


def _joined(passes: Sequence[Drawn], num_tokens: int, num_positions: int) -> Drawn:
    """The passes as one draft of so many tokens, with so many positions' distributions."""
    tokens_BG = torch.cat([one.tokens_BG for one in passes], 1)[:, :num_tokens]
    probs = [one.probs_BGV for one in passes if one.probs_BGV is not None]
    raws = [one.raw_BGV for one in passes if one.raw_BGV is not None]
    return Drawn(
        tokens_BG,
        torch.cat(probs, 1)[:, :num_positions].contiguous() if probs else None,
        torch.cat(raws, 1)[:, :num_positions].contiguous() if raws else None,
    )
