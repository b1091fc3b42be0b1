"""Times forward passes, and requests decoded with two decoders.

Everything that is compared is interleaved in one process, so that variation in machine load affects
both sides. Passes are compared by medians, requests by bootstrap intervals.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.block import DrawPlan, DrawRequest, UniformRows, VerifyRequest
from paceline.core.bootstrap import (
    Interval,
    least_values,
    median_interval,
    ratio_of_ratios_interval,
)
from paceline.core.rules import Lossless
from paceline.core.sampling import proposal_params
from paceline.core.speed import predicted_speedup
from paceline.core.stats import DecodeStats
from paceline.decode.block import draw, verify
from paceline.decode.text import count_blocks
from paceline.errors import ContextLengthError, UsageError
from paceline.models.compatibility import check_rollback, check_same_vocabulary
from paceline.models.contract import decoder_contexts, decoder_prompt_of
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from paceline.core.block import Drafted
    from paceline.core.sampling import SamplingParams
    from paceline.decode import Block
    from paceline.decode.decoder import Decoder
    from paceline.models.contract import Model, ModelSession

_WARM_TOKENS = 8


class PassCosts(NamedTuple):
    """Median seconds of one token from each model, of drafting and of verifying gamma tokens.

    `block_ratios`: block / target pass of each round of timing, by gamma; empty if not timed here.
    """

    target_pass_s: float
    draft_pass_s: float
    drafting_s: dict[int, float]
    judging_s: dict[int, float]
    target_start_s: float | None = None
    """Of an encoder-decoder: seconds from a source to the first logits, encoder included."""
    draft_start_s: float | None = None
    block_ratios: Mapping[int, Sequence[float]] = MappingProxyType({})

    @classmethod
    def of_rounds(
        cls, seconds: Mapping[tuple[str, int], Sequence[float]], gammas: Sequence[int]
    ) -> PassCosts:
        """Medians over rounds; `seconds` of each round by part and number of tokens."""
        median = {case: statistics.median(times) for case, times in seconds.items()}

        def ratios(gamma: int) -> list[float]:
            parts = seconds["drafting", gamma], seconds["judging", gamma], seconds["target", 1]
            return [(draw + judge) / target for draw, judge, target in zip(*parts, strict=True)]

        return cls(
            median["target", 1],
            median["draft", 1],
            {gamma: median["drafting", gamma] for gamma in gammas},
            {gamma: median["judging", gamma] for gamma in gammas},
            median.get(("target start", 0)),
            median.get(("draft start", 0)),
            {gamma: ratios(gamma) for gamma in gammas},
        )

    @classmethod
    def of_parameters(cls, ratio: float, gammas: Sequence[int]) -> PassCosts:
        """Costs of models that cannot be timed, in target passes, as MBSU assumes them.

        `ratio`: draft parameters / target parameters. A block costs the target one pass.
        """
        drafting = {gamma: gamma * ratio for gamma in gammas}
        return cls(1.0, ratio, drafting, dict.fromkeys(gammas, 1.0))

    @property
    def cost_ratio(self) -> float:
        """c = draft pass / target pass."""
        return self.draft_pass_s / self.target_pass_s

    def drafting_cost_ratio(self, gamma: int) -> float:
        """c within a block, where the draft's weights may still be in the cache."""
        return self.drafting_s[gamma] / gamma / self.target_pass_s

    def block_cost_ratio(self, gamma: int) -> float:
        """Target pass over gamma + 1 tokens with verification / target pass over one token."""
        return self.judging_s[gamma] / self.target_pass_s

    def block_s(self, gamma: int) -> float:
        """Seconds of a block of gamma drafted tokens."""
        return self.drafting_s[gamma] + self.judging_s[gamma]

    def error_of_block(self, gamma: int, confidence: float) -> tuple[float, float]:
        """Relative error of block_s / target_pass_s as a lower and an upper factor.

        From the median of the rounds' ratios, in which what slows a whole round cancels. Too few
        rounds for this confidence give 0 and infinity; see `least_values`.
        """
        ratios = self.block_ratios.get(gamma, ())
        if len(ratios) < least_values(confidence):
            return 0.0, math.inf
        _, low, high = median_interval(torch.tensor(ratios), confidence)
        value = self.block_s(gamma) / self.target_pass_s
        return min(low / value, 1.0), max(high / value, 1.0)

    def expected_speedup(
        self, block_efficiency: float, gamma: int, drafted: float | None = None
    ) -> float:
        """Expected speedup on this machine: block efficiency / cost of a block in target passes.

        `drafted`: mean number of drafted tokens per block; None: gamma. Both costs of a block are
        assumed to be linear in it.
        """
        part = 1.0 if drafted is None else drafted / gamma
        ratio = part * self.drafting_cost_ratio(gamma)
        block = 1 + part * (self.block_cost_ratio(gamma) - 1)
        return predicted_speedup(block_efficiency, gamma, ratio, block)


class PassTimer:
    """Times the parts of decoding after one prompt and tokens generated from it, interleaved."""

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
        shared = check_same_vocabulary(target, draft)
        check_rollback(target, draft)
        self._target, self._draft = target.start_session(), draft.start_session()
        self._starts: dict[str, Model] = {}
        if decoder_prompt_of(target) is None:
            prompt, generated = [*prompt, *generated], ()
        else:
            self._starts = {"target start": target, "draft start": draft}
        self._prompt = prompt
        for session in (self._target, self._draft):
            session.vocab_size = shared
            session.prefill([prompt])
            if generated:
                session.extend(torch.tensor([list(generated)]))
        self._sampling = sampling
        self._draft_sampling = proposal_params(sampling, draft_sampling)
        self._token = [*decoder_contexts(target, [prompt])[0], *generated][-1]
        self._gammas = gammas
        self._seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(2):  # warm-up
            self.time_once()
        self._seconds.clear()

    def run(self, repeats: int, progress: Progress = silent) -> PassCosts:
        """Time everything `repeats` times. -> medians."""
        for number in range(repeats):
            self.time_once()
            progress("timing passes", number + 1, repeats)
        return self.costs()

    @torch.inference_mode()
    def time_once(self) -> None:
        """Time one token of each model, and one block of each gamma."""
        for name, model in self._starts.items():
            session = model.start_session()
            start = _now()
            session.prefill([self._prompt])
            self._seconds.setdefault((name, 0), []).append(_now() - start)
        self._draw("target", self._target, 1, self._sampling)
        self._draw("draft", self._draft, 1, self._draft_sampling)
        for gamma in self._gammas:
            drafted = self._draw("drafting", self._draft, gamma, self._draft_sampling)
            uniforms = None if self._sampling.greedy else UniformRows([[0.5] * gamma], [0.5])
            with self._timed("judging", gamma, self._target):
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
        with self._timed(name, count, session):
            return draw(session, DrawRequest([[self._token]], DrawPlan(count, sampling), uniforms))

    @contextlib.contextmanager
    def _timed(self, name: str, count: int, session: ModelSession) -> Generator[None]:
        length = session.lengths[0]
        start = _now()
        yield
        self._seconds.setdefault((name, count), []).append(_now() - start)
        session.rollback([session.lengths[0] - length])

    def costs(self) -> PassCosts:
        """Medians over the rounds so far."""
        return PassCosts.of_rounds(self._seconds, self._gammas)


class PairedTimes(NamedTuple):
    """Seconds and new tokens of each request, for baseline and method; the method's counts.

    `*_first_s`: seconds to the first token; included in `*_s`.
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
        """Seconds per token of the baseline / of the method, with an interval over requests."""
        return ratio_of_ratios_interval(
            (torch.tensor(self.baseline_s), torch.tensor(self.baseline_tokens)),
            (torch.tensor(self.method_s), torch.tensor(self.method_tokens)),
            rng=rng,
        )

    def decoding_speedup(self, rng: torch.Generator) -> Interval:
        """`speedup` without the time to the first token."""
        baseline = torch.tensor(self.baseline_s) - torch.tensor(self.baseline_first_s)
        method = torch.tensor(self.method_s) - torch.tensor(self.method_first_s)
        return ratio_of_ratios_interval(
            (baseline, torch.tensor(self.baseline_tokens) - self.num_repeats),
            (method, torch.tensor(self.method_tokens) - self.num_repeats),
            rng=rng,
        )


def warm_up(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> None:
    """Decode the longest prompt once; on a GPU to its end, so that all CUDA graphs are captured.

    Raises:
        ContextLengthError: the prompt fills the context.
    """
    prompt = max(prompts, key=len)
    tokens = max_new_tokens if torch.cuda.is_available() else min(_WARM_TOKENS, max_new_tokens)
    free = decoder.remaining_context(prompt)
    if free is not None and free < 1:
        raise ContextLengthError(
            f"a prompt has {len(prompt):,} tokens, but {decoder.context_in_words()}; use shorter "
            "prompts"
        )
    decoder.generate([prompt], tokens if free is None else min(tokens, free), seed)


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
    """Decode each prompt with both decoders, in alternating order.

    Texts end at a stop token, as in serving, so both decoders may generate different numbers of
    tokens; compare seconds per token. `between` is called after each pair.

    Raises:
        ContextLengthError: a prompt and its new tokens do not fit the context.
        UsageError: no text was long enough for drafting.
    """
    decoders = (baseline, method)
    for row, prompt in enumerate(prompts):
        if not has_room(method, prompt, max_new_tokens):
            raise ContextLengthError(
                f"prompt {row} has {len(prompt):,} tokens and max_new_tokens is {max_new_tokens}, "
                f"but {method.context_in_words()}; lower max_prompt_tokens or max_new_tokens"
            )
    for decoder in decoders:
        warm_up(decoder, prompts, max_new_tokens, seed)
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
            "every timed text ended before anything was drafted; use other prompts, or skip the "
            "timing with timed_prompts=0"
        )
    return PairedTimes(
        seconds[0], seconds[1], firsts[0], firsts[1], tokens[0], tokens[1], stats, num_repeats
    )


def has_room(decoder: Decoder, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """True if the context has space for `max_new_tokens` after the prompt."""
    free = decoder.remaining_context(prompt)
    return free is None or free >= max_new_tokens


def time_request(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, seed: int
) -> tuple[float, float, list[Block]]:
    """Decode one request. -> seconds to the first token, seconds to the last, blocks."""
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
