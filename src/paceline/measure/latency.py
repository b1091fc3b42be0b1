"""Times forward passes and requests, and chooses the number of drafted tokens per block.

Everything that is compared is interleaved in one process, so that variation in machine load affects
both sides. Passes are compared by medians, requests by bootstrap intervals.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.block import DrawPlan, DrawRequest, Uniforms, VerifyRequest
from paceline.core.bootstrap import LEAST_UNITS, Interval, least_values, median_interval
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, proposal_params
from paceline.core.speed import break_even_acceptance
from paceline.core.stats import DecodeStats, TimedAnswer, Times
from paceline.decode.block import draw, verify
from paceline.decode.decoder import shared_context
from paceline.decode.text import count_blocks
from paceline.errors import UsageError
from paceline.measure.results import gamma_of, value_of
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.contract import decoder_contexts
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES
from paceline.results.row import sums_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from paceline.core.block import Drafted
    from paceline.decode.decoder import Decoder
    from paceline.measure.acceptance import PairTexts
    from paceline.models.contract import Model, ModelSession
    from paceline.results.row import Row

_WARM_TOKENS = 8
_CHOOSING_PART = 4  # one request in four is for choosing gamma
_MAX_CHOOSING = 8
_NUM_ROUNDS = 2  # of choosing
_TIMED_COUNTS = ("emitted", "calls", "examined", "rejected")


@dataclass(frozen=True)
class PassCosts:
    """Median seconds of one token from each model, of drafting and of verifying gamma tokens.

    Attributes:
        errors: Relative error of block / target pass by gamma: 1 with its 95% interval. Without the
            gammas that were timed in too few rounds for one.
        engine: The engine with these costs; empty: Paceline's decoder.
        drafts_in_full: A block costs the same at the end of a text: the engine drafts gamma tokens
            there, too, or a parallel draft has one pass per block.
    """

    target_pass_s: float
    draft_pass_s: float
    drafting_s: Mapping[int, float]
    verifying_s: Mapping[int, float]
    errors: Mapping[int, Interval] = field(default_factory=dict[int, Interval])
    engine: str = ""
    drafts_in_full: bool = False

    @classmethod
    def of_rounds(
        cls,
        seconds: Mapping[tuple[str, int], Sequence[float]],
        gammas: Sequence[int],
        **settings: Any,
    ) -> PassCosts:
        """Medians over rounds; `seconds` of each round by part and number of tokens."""
        median = {case: statistics.median(times) for case, times in seconds.items()}
        costs = cls(
            median["target", 1],
            median["draft", 1],
            {gamma: median["drafting", gamma] for gamma in gammas},
            {gamma: median["verifying", gamma] for gamma in gammas},
            **settings,
        )
        if len(seconds["target", 1]) < least_values(0.95):
            return costs

        def error(gamma: int) -> Interval:
            """From the rounds' ratios, in which what slows a whole round cancels."""
            parts = seconds["drafting", gamma], seconds["verifying", gamma], seconds["target", 1]
            ratios = [
                (draft + verify) / target for draft, verify, target in zip(*parts, strict=True)
            ]
            _, low, high = median_interval(torch.tensor(ratios))
            value = costs.block_cost(gamma)
            return Interval(1.0, min(low / value, 1.0), max(high / value, 1.0))

        return replace(costs, errors={gamma: error(gamma) for gamma in gammas})

    @classmethod
    def of_blocks(cls, plain_s: float, block_s: Mapping[int, float], **settings: Any) -> PassCosts:
        """Of the seconds of an engine's plain step, and of a block by gamma.

        Engines report the time of a block, but not the draft's part of it. So a block counts as one
        target pass over one token, and the rest as drafting: the c for which tau / (c gamma + 1) is
        the engine's speedup.
        """
        drafting_s = {gamma: max(seconds - plain_s, 0.0) for gamma, seconds in block_s.items()}
        verifying_s = {gamma: block_s[gamma] - drafting_s[gamma] for gamma in block_s}
        least = min(block_s)
        draft_pass_s = drafting_s[least] / least
        return cls(plain_s, draft_pass_s, drafting_s, verifying_s, **settings)

    @property
    def cost_ratio(self) -> float:
        """c = draft pass / target pass."""
        return self.draft_pass_s / self.target_pass_s

    def drafting_cost_ratio(self, gamma: int) -> float:
        """c within a block, where the draft's weights may still be in the cache."""
        return self.drafting_s[gamma] / gamma / self.target_pass_s

    def block_cost_ratio(self, gamma: int) -> float:
        """Target pass over gamma + 1 tokens with verification / target pass over one token."""
        return self.verifying_s[gamma] / self.target_pass_s

    def block_cost(self, gamma: int, drafted: float | None = None) -> float:
        """A block in target passes over one token: the tokens per target call without a speedup.

        `drafted`: mean number of drafted tokens per block; None: gamma. The cost is linear in it,
        unless the engine drafts in full.
        """
        whole = self.block_s(gamma) / self.target_pass_s
        return 1 + self.part_drafted(gamma, drafted) * (whole - 1)

    def block_s(self, gamma: int) -> float:
        """Seconds of a block of gamma drafted tokens."""
        return self.drafting_s[gamma] + self.verifying_s[gamma]

    def bounds_of_cost(self, gamma: int, drafted: float) -> tuple[float, float] | None:
        """95% bounds of `block_cost`; None if the gamma was timed in too few rounds."""
        if gamma not in self.errors:
            return None
        cost = self.block_cost(gamma, drafted)
        spread = self.part_drafted(gamma, drafted) * self.block_cost(gamma)
        _, low, high = self.errors[gamma]
        return cost + spread * (low - 1), cost + spread * (high - 1)

    def part_drafted(self, gamma: int, drafted: float | None) -> float:
        """Part of a block of gamma tokens that blocks of this mean length draft."""
        return 1.0 if self.drafts_in_full or drafted is None else drafted / gamma

    def priced(self, row: Row) -> Row:
        """A row with blocks, and what these cost, as totals with their bounds.

        In an engine c is that of this gamma: it includes more than the draft's passes.
        """
        gamma, drafted = gamma_of(row), row.totals["drafted_per_block"]
        c, verifying = self.drafting_cost_ratio(gamma), self.block_cost_ratio(gamma)
        totals = {
            "cost_ratio": c if self.engine or self.drafts_in_full else self.cost_ratio,
            "drafting_cost_ratio": c,
            "block_cost_ratio": verifying,
            "block_cost": self.block_cost(gamma, drafted),
            "needed_block_efficiency": self.block_cost(gamma),
            "break_even_acceptance": break_even_acceptance(gamma, c, verifying),
            "block_s": self.block_s(gamma),
        }
        bounds, whole = self.bounds_of_cost(gamma, drafted), self.bounds_of_cost(gamma, gamma)
        known = {} if bounds is None else {"block_cost": bounds}
        if whole is not None and totals["break_even_acceptance"] <= 1:
            low, high = (min(1.0, break_even_acceptance(gamma, 0.0, cost)) for cost in whole)
            known["break_even_acceptance"] = low, high
        return row.extended({}, totals).model_copy(update={"bounds": row.bounds | known})


class PassTimer:
    """Times the parts of decoding after one prompt and tokens generated from it, interleaved.

    Where the context has no space for a block behind them, after fewer of these tokens.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        prompt: Sequence[int],
        gammas: Sequence[int],
        sampling: SamplingParams,
        draft_sampling: SamplingParams | None = None,
        generated: Sequence[int] = (),
    ) -> None:
        self._pair = target, draft
        shared = check_same_vocabulary(target, draft)
        begun, limit = decoder_contexts(target, [prompt])[0], shared_context(target, draft)
        text = [*begun, *generated]
        if limit is not None:  # a block needs space behind it
            text = text[: max(limit - max(gammas, default=0) - 1, 1)]
        self._token, generated = text[-1], text[len(begun) :]
        self._target, self._draft = target.start_session(), draft.start_session()
        self._alone = target.start_session()  # nothing takes its tokens back, as without a draft
        if target.decoder_prompt is None:
            prompt, generated = text, ()
        for session in (self._target, self._draft, self._alone):
            session.vocab_size = shared
            session.prefill([prompt])
            if generated:
                session.extend(torch.tensor([generated]))
        self._sampling, self._mask = sampling, draft.mask_token
        self._draft_sampling = proposal_params(sampling, draft_sampling)
        self._gammas = gammas
        self._seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(2):  # warm-up
            self.time_once()
        self._seconds.clear()

    @classmethod
    def within(cls, texts: PairTexts, gammas: Sequence[int]) -> PassTimer:
        """In the middle of a typical text: after the first prompt and half of the most tokens."""
        begun = texts.completions[0][: texts.most // 2]
        samplings = texts.sampling, texts.draft_sampling
        return cls(*texts.pair, texts.prompts[0], gammas, *samplings, begun)

    def run(self, repeats: int, progress: Progress = silent) -> PassCosts:
        """Time everything `repeats` times. -> medians."""
        for number in range(repeats):
            self.time_once()
            progress("timing passes", number + 1, repeats)
        return self.costs()

    @torch.inference_mode()
    def time_once(self) -> None:
        """Time one token of each model, and one block of each gamma."""
        self._draw("target", self._alone, 1, self._sampling)
        self._draw("draft", self._draft, 1, self._draft_sampling)
        for gamma in self._gammas:
            drafted = self._draw("drafting", self._draft, gamma, self._draft_sampling)
            uniforms = None if self._sampling.greedy else Uniforms([[0.5] * gamma], [0.5])
            with self._timed("verifying", gamma, self._target):
                request = VerifyRequest(
                    [self._token], drafted, [gamma], Lossless(), self._sampling, uniforms
                )
                verify(self._target, request)

    def _draw(
        self, name: str, session: ModelSession, count: int, sampling: SamplingParams
    ) -> Drafted:
        # a sampling target needs the draft's distributions, also of a greedy draft
        greedy = sampling.greedy and self._sampling.greedy
        uniforms = None if greedy else [[0.5] * count]
        plan = DrawPlan(count, sampling, mask=self._mask if name == "drafting" else None)
        with self._timed(name, count, session):
            return draw(session, DrawRequest([[self._token]], plan, uniforms))

    @contextlib.contextmanager
    def _timed(self, name: str, count: int, session: ModelSession) -> Generator[None]:
        length = session.lengths[0]
        start = _now(self._pair)
        yield
        self._seconds.setdefault((name, count), []).append(_now(self._pair) - start)
        if session is not self._alone or session.lengths[0] == session.max_length:
            session.rollback([session.lengths[0] - length])

    def costs(self) -> PassCosts:
        """Medians over the rounds so far."""
        at_once = self._mask is not None
        return PassCosts.of_rounds(self._seconds, self._gammas, drafts_in_full=at_once)


def time_request(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, seed: int
) -> TimedAnswer:
    start = _now()
    stream = decoder.stream(prompt, max_new_tokens, seed)
    blocks = [next(stream)]
    first = _now() - start
    blocks += stream
    seconds = _now() - start
    tokens = [token for block in blocks for token in block.tokens]
    times = Times(seconds, first, len(tokens), len(blocks[0].tokens))
    return TimedAnswer(tokens, times, count_blocks(blocks))


def _now(models: Iterable[Model] = ()) -> float:
    """Seconds of a clock, read when the GPUs of these models have done their work."""
    for device in {getattr(model, "device", torch.device("cpu")) for model in models}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def warm_up(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> None:
    """Decode the longest prompt once; on a GPU to its end, so that all CUDA graphs are captured."""
    prompt = max(prompts, key=len)
    tokens = max_new_tokens if torch.cuda.is_available() else min(_WARM_TOKENS, max_new_tokens)
    free = decoder.remaining_context(prompt)
    decoder.generate([prompt], tokens if free is None else max(1, min(tokens, free)), seed)


class PairedTimes(NamedTuple):
    """Times of the same prompts with two decoders, and counts of the method's blocks, by prompt."""

    baseline: list[Times]
    method: list[Times]
    counts: list[DecodeStats]

    @property
    def stats(self) -> DecodeStats:
        return sum(self.counts, DecodeStats())

    @property
    def sums(self) -> dict[str, tuple[float | None, ...]]:
        """Sums of each prompt by their names in result rows."""
        return sums_of(
            [
                method.sums()
                | baseline.sums("target_")
                | {name: stats.sums[name] for name in _TIMED_COUNTS}
                for baseline, method, stats in zip(*self, strict=True)
            ]
        )


def time_pairs(
    baseline: Decoder,
    method: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    progress: Progress,
) -> PairedTimes:
    """Decode each prompt with both decoders, in alternating order.

    Texts end at a stop token, as in serving, so both decoders may generate different numbers of
    tokens; compare seconds per token.
    """
    for decoder in (baseline, method):
        warm_up(decoder, prompts, max_new_tokens, seed)
    times = PairedTimes([], [], [])
    sides = [(baseline, times.baseline), (method, times.method)]
    for row, prompt in enumerate(prompts):
        for decoder, side in sides if row % 2 else sides[::-1]:
            request = time_request(decoder, prompt, max_new_tokens, seed + row)
            side.append(request.times)
            if decoder is method:
                times.counts.append(request.stats)
        progress("timing requests", row + 1, len(prompts))
    if not times.stats.num_drafted:
        raise UsageError(
            "every timed text ended before anything was drafted; use other prompts, or skip the "
            "timing with timed_prompts=0"
        )
    return times


def num_choosing(num_requests: int) -> int:
    """Number of requests for choosing gamma; 0 if too few would remain for the timing."""
    count = min(num_requests // _CHOOSING_PART, _MAX_CHOOSING)
    enough = count >= _NUM_ROUNDS and num_requests - count >= LEAST_UNITS
    return count if enough else 0


def candidates(rows: Sequence[Row]) -> list[Row]:
    """Up to three gammas to time: the two with the highest expected speedup, and a smaller one.

    The third is the one nearest to half the best: if blocks cost more than expected, the fastest
    gamma may be much smaller.
    """
    best, *others = sorted(rows, key=FIGURES["expected_speedup"].value, reverse=True)
    chosen, rest = [best, *others[:1]], others[1:]
    if rest:
        chosen.append(min(rest, key=lambda row: abs(gamma_of(row) - gamma_of(best) / 2)))
    return chosen


def choose_gamma(
    tried: Sequence[tuple[Row, Decoder]],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int,
    progress: Progress,
) -> tuple[int, list[Row]]:
    """Time the candidates, the rows of scored texts with blocks of a gamma, and their decoders.

    Candidates are compared by predicted tokens per block / measured seconds per block: a few
    requests suffice to measure the cost of a block, but not its number of tokens. Each of two
    rounds uses half of the prompts; the second is without the slowest of three candidates. Do not
    reuse these requests to measure the speedup, since they selected gamma.

    Returns:
        The place of the fastest, and the rows with the median seconds per block, which is robust to
        interruptions.
    """
    block_s: list[list[float]] = [[] for _ in tried]
    num_requests = [0] * len(tried)

    def timed(place: int) -> Row:
        scored, _ = tried[place]
        totals = {name: value for name, value in scored.totals.items() if name != "block_s"}
        totals |= {"block_s": statistics.median(block_s[place])} if block_s[place] else {}
        totals["num_requests"] = num_requests[place]
        changes = {"setting": scored.setting | {"timed": "choosing"}, "totals": totals}
        return scored.model_copy(update=changes)

    def speed(place: int) -> float:
        return value_of(timed(place), "decoding_tokens_per_s") or 0.0

    for _, decoder in tried:
        warm_up(decoder, prompts, max_new_tokens, seed)
    running = list(range(len(tried)))
    for number, prompt in enumerate(prompts):
        if number == (len(prompts) + 1) // 2 and len(running) > _NUM_ROUNDS:
            running.remove(min(running, key=speed))
        for index in range(len(running)):
            place = running[(index + number) % len(running)]
            request = time_request(tried[place][1], prompt, max_new_tokens, seed + number)
            num_requests[place] += 1
            if num_blocks := request.stats.num_blocks:
                seconds = request.times.seconds - request.times.first_seconds
                block_s[place].append(seconds / num_blocks)
        progress("choosing gamma", number + 1, len(prompts))
    return max(running, key=speed), list(map(timed, range(len(tried))))
