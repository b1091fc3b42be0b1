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
from paceline.decode.result import count_blocks
from paceline.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.decode import Block
    from paceline.decode.decoder import Decoder
    from paceline.models.session import Model
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


class PassTimer:
    """Single passes after one prompt, each case in turn."""

    def __init__(
        self, target: Model, draft: Model, prompt: Sequence[int], gammas: Sequence[int]
    ) -> None:
        self._sessions = {"target": target.start_session(), "draft": draft.start_session()}
        for session in self._sessions.values():
            session.prefill([prompt])
        self._token = prompt[-1]
        self._gammas = gammas
        cases = [("target", 1), ("draft", 1), *(("target", gamma + 1) for gamma in gammas)]
        self._seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for _ in range(2):  # warms up
            self.time_once()
        for times in self._seconds.values():
            times.clear()

    @torch.inference_mode()
    def time_once(self) -> None:
        """Time each case once more."""
        for (name, num_tokens), times in self._seconds.items():
            session = self._sessions[name]
            tokens = torch.full((1, num_tokens), self._token)
            start = _now()
            session.extend(tokens)
            times.append(_now() - start)
            session.rollback([num_tokens])

    def costs(self) -> PassCosts:
        """Medians over the rounds so far."""
        median = {case: statistics.median(times) for case, times in self._seconds.items()}
        blocks = {gamma: median["target", gamma + 1] for gamma in self._gammas}
        return PassCosts(median["target", 1], median["draft", 1], blocks)


class PairedTimes(NamedTuple):
    """Seconds and new tokens of each request, baseline and method; the method's counts.

    `*_first_s`: the part of the seconds until the first token, which is the pass over the prompt.
    """

    baseline_s: list[float]
    method_s: list[float]
    baseline_first_s: list[float]
    method_first_s: list[float]
    baseline_tokens: list[int]
    method_tokens: list[int]
    stats: DecodeStats
    num_repeats: int = 1

    def speedup(self, rng: torch.Generator) -> Interval:
        """Seconds a token of the baseline / of the method, the interval over requests."""
        return ratio_of_ratios_interval(
            (torch.tensor(self.baseline_s), torch.tensor(self.baseline_tokens)),
            (torch.tensor(self.method_s), torch.tensor(self.method_tokens)),
            rng=rng,
        )

    def decoding_speedup(self, rng: torch.Generator) -> Interval:
        """The same from the first token on."""
        baseline = torch.tensor(self.baseline_s) - torch.tensor(self.baseline_first_s)
        method = torch.tensor(self.method_s) - torch.tensor(self.method_first_s)
        return ratio_of_ratios_interval(
            (baseline, torch.tensor(self.baseline_tokens) - self.num_repeats),
            (method, torch.tensor(self.method_tokens) - self.num_repeats),
            rng=rng,
        )


def time_pairs(
    baseline: Decoder,
    method: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    num_repeats: int,
    progress: Progress,
    between: Callable[[], None] = lambda: None,
) -> PairedTimes:
    """Decode each prompt both ways, one after the other, the first to go changing every time.

    Texts end where they would be served to their end: behind a stop token the target is not itself
    and no draft was made for that. So both may write different numbers of tokens, and seconds a
    token are compared. `between` is called after each pair.

    Raises:
        ContextLengthError: a prompt and its new tokens do not fit the context.
        UsageError: no text was long enough for anything to be drafted.
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
    firsts = [[0.0] * len(prompts) for _ in decoders]
    tokens = [[0] * len(prompts) for _ in decoders]
    stats = DecodeStats()
    num_runs = num_repeats * len(prompts)
    for number in range(num_runs):
        row = number % len(prompts)
        for which in (0, 1) if number % 2 else (1, 0):
            first_s, all_s, blocks = time_request(
                decoders[which], prompts[row], max_new_tokens, seed + number
            )
            firsts[which][row] += first_s
            seconds[which][row] += all_s
            tokens[which][row] += sum(len(block.tokens) for block in blocks)
            if which == 1:
                stats += count_blocks(blocks)
        between()
        progress("timing requests", number + 1, num_runs)
    if not stats.num_drafted:
        raise UsageError(
            "every timed text ended before anything was drafted; use other prompts, or leave the "
            "timing out with timed_prompts=0"
        )
    return PairedTimes(
        seconds[0], seconds[1], firsts[0], firsts[1], tokens[0], tokens[1], stats, num_repeats
    )


def time_request(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, seed: int
) -> tuple[float, float, list[Block]]:
    """Seconds to the first token and to the last, and what came."""
    start = _now()
    stream = decoder.stream(prompt, max_new_tokens, seed)
    blocks = [next(stream)]
    first = _now() - start
    blocks += stream
    return first, _now() - start, blocks


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
