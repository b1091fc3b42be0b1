"""Seconds: of one pass, and of whole requests decoded two ways.

Everything that is compared runs interleaved in one process, so that a slow minute of the machine
falls on both sides; medians and resampled intervals say how sure a ratio is.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import Interval, ratio_of_ratios_interval
from paceline.core.stats import DecodeStats
from paceline.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decode.decoder import Decoder
    from paceline.models.session import Model, ModelSession
    from paceline.progress import Progress


class PassCosts(NamedTuple):
    """Median seconds: one token through each model; gamma + 1 tokens through the target."""

    target_pass_s: float
    draft_pass_s: float
    target_block_s: dict[int, float]

    @property
    def cost_ratio(self) -> float:
        """c = draft pass / target pass."""
        return self.draft_pass_s / self.target_pass_s

    def block_cost_ratio(self, gamma: int) -> float:
        """Target pass over gamma + 1 tokens / over one."""
        return self.target_block_s[gamma] / self.target_pass_s


class PairedTimes(NamedTuple):
    """Seconds and new tokens of each request, baseline and method; the method's counts."""

    baseline_s: list[float]
    method_s: list[float]
    baseline_tokens: list[int]
    method_tokens: list[int]
    stats: DecodeStats

    def speedup(self, rng: torch.Generator) -> Interval:
        """Seconds a token of the baseline / of the method, the interval over requests."""
        return ratio_of_ratios_interval(
            (torch.tensor(self.baseline_s), torch.tensor(self.baseline_tokens)),
            (torch.tensor(self.method_s), torch.tensor(self.method_tokens)),
            rng=rng,
        )


@torch.inference_mode()
def time_passes(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    gammas: Sequence[int],
    *,
    num_repeats: int,
    progress: Progress,
) -> PassCosts:
    """Time single passes after this prompt, round robin, medians over the rounds."""
    sessions = {"target": target.start_session(), "draft": draft.start_session()}
    for session in sessions.values():
        session.prefill([prompt])
    cases = [("target", 1), ("draft", 1), *(("target", gamma + 1) for gamma in gammas)]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for round_ in range(num_repeats + 2):
        for case in cases:
            name, num_tokens = case
            elapsed = _time_pass(sessions[name], prompt[-1], num_tokens)
            if round_ >= 2:  # the first rounds warm up
                seconds[case].append(elapsed)
        progress("timing passes", round_ + 1, num_repeats + 2)
    median = {case: statistics.median(times) for case, times in seconds.items()}
    blocks = {gamma: median["target", gamma + 1] for gamma in gammas}
    return PassCosts(median["target", 1], median["draft", 1], blocks)


def _time_pass(session: ModelSession, token: int, num_tokens: int) -> float:
    tokens = torch.full((1, num_tokens), token)
    start = _now()
    session.extend(tokens)
    elapsed = _now() - start
    session.rollback([num_tokens])
    return elapsed


def time_pairs(
    baseline: Decoder,
    method: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    num_repeats: int,
    progress: Progress,
) -> PairedTimes:
    """Decode each prompt both ways, one after the other, the first to go changing every time.

    Texts end where they would be served to their end: behind a stop token the target is not itself
    and no draft was made for that. So both may write different numbers of tokens, and seconds a
    token are compared. The whole request counts, prefill included.

    Raises:
        ContextLengthError: a prompt and its new tokens do not fit the context.
    """
    decoders = (baseline, method)
    for decoder in decoders:
        decoder.generate([prompts[0]], min(8, max_new_tokens), seed)  # warms up
    for row, prompt in enumerate(prompts):
        room = method.room(prompt)
        if room is not None and room < max_new_tokens:
            raise ContextLengthError(
                f"prompt {row} leaves room for {room} tokens of the {max_new_tokens} to be timed; "
                "shorten the prompts or ask for fewer new tokens"
            )
    seconds = [[0.0] * len(prompts) for _ in decoders]
    tokens = [[0] * len(prompts) for _ in decoders]
    stats = DecodeStats()
    num_runs = num_repeats * len(prompts)
    for number in range(num_runs):
        row = number % len(prompts)
        for which in (0, 1) if number % 2 else (1, 0):
            start = _now()
            (generation,) = decoders[which].generate([prompts[row]], max_new_tokens, seed + number)
            seconds[which][row] += _now() - start
            tokens[which][row] += len(generation.tokens)
            if which == 1:
                stats += generation.stats
        progress("timing requests", number + 1, num_runs)
    return PairedTimes(seconds[0], seconds[1], tokens[0], tokens[1], stats)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
