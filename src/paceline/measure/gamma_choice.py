"""Chooses gamma by timing a few requests, because the predicted best gamma may be wrong."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from paceline.core.bootstrap import LEAST_UNITS
from paceline.decode.text import count_blocks
from paceline.measure.latency import time_request, warm_up
from paceline.measure.results import TriedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.decode.decoder import Decoder
    from paceline.decode.text import Block
    from paceline.measure.results import GammaRow
    from paceline.progress import Progress

_CHOOSING_PART = 4  # one request in four is for choosing
_MAX_CHOOSING = 8
_NUM_ROUNDS = 2


def num_choosing(num_requests: int) -> int:
    """Number of requests for choosing gamma; 0 if too few would remain for the timing."""
    count = min(num_requests // _CHOOSING_PART, _MAX_CHOOSING)
    enough = count >= _NUM_ROUNDS and num_requests - count >= LEAST_UNITS
    return count if enough else 0


def candidates(rows: Sequence[GammaRow]) -> list[GammaRow]:
    """Up to three gammas to time: the two with the highest expected speedup, and a smaller one.

    The third is the one nearest to half the best: if blocks cost more than expected, the fastest
    gamma may be much smaller.
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
    """Time the candidates. -> the fastest, and the figures of all.

    Candidates are compared by predicted tokens per block / measured seconds per block: a few
    requests suffice to measure the cost of a block, but not its number of tokens. Each of two
    rounds uses half of the prompts; the second is without the slowest of three candidates. Do not
    reuse these requests to measure the speedup, since they selected gamma.
    """
    timed = [_Timed(row, decoder_of(row.gamma)) for row in rows]
    for one in timed:
        warm_up(one.decoder, prompts, max_new_tokens, seed)
    running = list(timed)
    for number, prompt in enumerate(prompts):
        if number == (len(prompts) + 1) // 2 and len(running) > _NUM_ROUNDS:
            running.remove(min(running, key=lambda one: one.tokens_per_s))
        for index in range(len(running)):
            one = running[(index + number) % len(running)]
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
    """A candidate and the seconds per block of its requests."""

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
        """From the median over requests, which is robust to interruptions; 0 without blocks."""
        if not self._block_s:
            return 0.0
        return self.row.block_efficiency / statistics.median(self._block_s)
