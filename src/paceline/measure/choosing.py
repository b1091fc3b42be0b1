"""Choose gamma by timing a few requests, since a prediction of the fastest one may be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.bootstrap import LEAST_UNITS
from paceline.measure.latency import has_room, time_request, warm_up
from paceline.measure.results import TriedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.decode.decoder import Decoder
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

    Two rounds, each on half of the prompts: all candidates, then all but the slowest of three. Nothing
    else may be concluded from these requests: the fastest is also the luckiest.
    """
    running = [row for row in rows if _fits(decoder_of(row.gamma), prompts, max_new_tokens)]
    if len(running) < 2:
        return rows[0], []
    decoders = {row.gamma: decoder_of(row.gamma) for row in running}
    for decoder in decoders.values():
        warm_up(decoder, prompts, max_new_tokens, seed)
    seconds = dict.fromkeys(decoders, 0.0)
    tokens = dict.fromkeys(decoders, 0)
    counts = dict.fromkeys(decoders, 0)
    for number, prompt in enumerate(prompts):
        if number == (len(prompts) + 1) // 2 and len(running) > _ROUNDS:
            running.remove(max(running, key=lambda row: seconds[row.gamma] / tokens[row.gamma]))
        for place in range(len(running)):
            gamma = running[(place + number) % len(running)].gamma
            _, spent_s, blocks = time_request(
                decoders[gamma], prompt, max_new_tokens, seed + number
            )
            seconds[gamma] += spent_s
            tokens[gamma] += sum(len(block.tokens) for block in blocks)
            counts[gamma] += 1
        progress("choosing gamma", number + 1, len(prompts))
    tried = [
        TriedRow(
            gamma=row.gamma,
            num_requests=counts[row.gamma],
            tokens_per_s=tokens[row.gamma] / seconds[row.gamma],
            expected_speedup=row.expected_speedup,
        )
        for row in rows
        if row.gamma in decoders
    ]
    fastest = min(running, key=lambda row: seconds[row.gamma] / tokens[row.gamma])
    return fastest, tried


def _fits(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> bool:
    return all(has_room(decoder, prompt, max_new_tokens) for prompt in prompts)
