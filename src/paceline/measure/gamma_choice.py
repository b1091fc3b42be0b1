"""Choose gamma by timing a few requests, since a prediction of the fastest one may be wrong."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from paceline.core.bootstrap import LEAST_UNITS
from paceline.decode.result import count_blocks
from paceline.measure.latency import time_request, warm_up
from paceline.measure.results import TriedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.decode.decoder import Decoder
    from paceline.decode.result import Block
    from paceline.measure.results import GammaRow
    from paceline.progress import Progress

_PART = 4  # one request in four chooses
_MOST = 8
_ROUNDS = 2


def num_choosing(num_requests: int) -> int:
    """How many of the requests to time are for choosing; 0 where the others would be too few."""
    count = min(num_requests // _PART, _MOST)
    enough = count >= _ROUNDS and num_requests - count >= LEAST_UNITS
    return count if enough else 0


def candidates(rows: Sequence[GammaRow]) -> list[GammaRow]:
    """Up to three gammas worth timing: the two of the largest expected speedup, and a shorter one.

    The third is the one nearest to half the best: where blocks cost more than expected, the fastest
    gamma may be much smaller, and its neighbours are as slow as the best itself.
    """
    best, *others = sorted(rows, key=lambda row: -row.expected_speedup)
    chosen, rest = [best, *others[:1]], others[1:]
    if rest:
        chosen.append(min(rest, key=lambda row: abs(row.gamma - best.gamma / 2)))
    return chosen


def choose_gamma(
    rows: Sequence[GammaRow],
    decoder_of: Callable[[int], Decoder],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    progress: Progress,
) -> tuple[GammaRow, list[TriedRow]]:
    """The fastest of the candidates, and what was tried.

    Compared by tokens of the scored texts per block / measured seconds per block: few requests tell
    what a block costs, while how many tokens these few blocks gave is mostly luck. Two rounds, each
    on half of the prompts: all candidates, then all but the slowest of three. Nothing else may be
    concluded from these requests.
    """
    timed = [_Timed(row, decoder_of(row.gamma)) for row in rows]
    for one in timed:
        warm_up(one.decoder, prompts, max_new_tokens, seed)
    running = list(timed)
    for number, prompt in enumerate(prompts):
        if number == (len(prompts) + 1) // 2 and len(running) > _ROUNDS:
            running.remove(min(running, key=lambda one: one.tokens_per_s))
        for place in range(len(running)):
            one = running[(place + number) % len(running)]
            one.add(time_request(one.decoder, prompt, max_new_tokens, seed + number))
        progress("choosing gamma", number + 1, len(prompts))
    tried = [
        TriedRow(
            gamma=one.row.gamma,
            num_requests=one.num_requests,
            tokens_per_s=one.tokens_per_s,
            expected_speedup=one.row.expected_speedup,
        )
        for one in timed
    ]
    return max(running, key=lambda one: one.tokens_per_s).row, tried


class _Timed:
    """A candidate and what its blocks took."""

    def __init__(self, row: GammaRow, decoder: Decoder) -> None:
        self.row = row
        self.decoder = decoder
        self.num_requests = 0
        self._block_s: list[float] = []

    def add(self, request: tuple[float, float, list[Block]]) -> None:
        first_s, all_s, blocks = request
        self.num_requests += 1
        if num_blocks := count_blocks(blocks).num_blocks:
            self._block_s.append((all_s - first_s) / num_blocks)

    @property
    def tokens_per_s(self) -> float:
        """With the median over requests, since one that was interrupted says nothing; 0 without a block."""
        if not self._block_s:
            return 0.0
        return self.row.block_efficiency / statistics.median(self._block_s)
