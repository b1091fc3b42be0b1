"""Times whole requests: chooses the fastest gamma, and measures its speedup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import speed as speed_model
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.gamma_choice import candidates, choose_gamma, num_choosing
from paceline.measure.latency import PassTimer, has_room, time_pairs
from paceline.measure.results import IntervalRow, SpeedRow, TriedRow
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.measure.measure_config import MeasureConfig
    from paceline.measure.results import GammaRow
    from paceline.models.contract import Model
    from paceline.progress import Progress


def time_best(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[GammaRow],
    begun: Sequence[int],
    config: MeasureConfig,
    progress: Progress,
) -> tuple[GammaRow, list[TriedRow], SpeedRow]:
    """Choose and time gamma, on separate requests. -> its row, all tried gammas, its timing."""
    timed_prompts = prompts[: config.timed_prompts]

    def decoder_of(gamma: int) -> SpeculativeDecoder:
        settings = gamma, config.sampling
        return SpeculativeDecoder(
            target, draft, None, *settings, draft_sampling=config.draft_sampling
        )

    def fits(row: GammaRow) -> bool:
        decoder = decoder_of(row.gamma)
        return all(has_room(decoder, prompt, config.max_new_tokens) for prompt in timed_prompts)

    chosen, *others = candidates(rows)
    others, tried = [row for row in others if fits(row)], list[TriedRow]()
    choosing = num_choosing(len(timed_prompts)) if others and fits(chosen) else 0
    if choosing:
        chosen, tried = choose_gamma(
            [chosen, *others],
            decoder_of,
            timed_prompts[:choosing],
            max_new_tokens=config.max_new_tokens,
            seed=config.seed + len(timed_prompts) * config.timed_repeats,  # not used by time_pairs
            progress=progress,
        )
    samplings = config.sampling, config.draft_sampling
    timer = PassTimer(target, draft, prompts[0], [], *samplings, generated=begun)
    decoders = AutoregressiveDecoder(target, config.sampling), decoder_of(chosen.gamma)
    timed = _time_requests(decoders, timed_prompts[choosing:], chosen, timer, config, progress)
    return chosen, tried, timed


def _time_requests(
    decoders: tuple[AutoregressiveDecoder, SpeculativeDecoder],
    prompts: Sequence[Sequence[int]],
    chosen: GammaRow,
    timer: PassTimer,
    config: MeasureConfig,
    progress: Progress,
) -> SpeedRow:
    """Paired timing at the chosen gamma; single passes are timed between the requests."""
    times = time_pairs(
        *decoders,
        prompts,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        num_repeats=config.timed_repeats,
        progress=progress,
        between=timer.time_once,
    )
    for _ in range(config.pass_repeats - len(times.baseline_s) * config.timed_repeats):
        timer.time_once()
    rng = named_generator(config.seed, "bootstrap-speed")
    decoding = IntervalRow.of(times.decoding_speedup(rng))
    ratio, tau = timer.costs().cost_ratio, times.stats.block_efficiency
    predicted = speed_model.predicted_speedup(chosen.block_efficiency, chosen.gamma, ratio)
    reachable = speed_model.predicted_speedup(tau, chosen.gamma, ratio)
    return SpeedRow(
        gamma=chosen.gamma,
        num_requests=len(times.baseline_s),
        num_tokens=sum(times.method_tokens),
        speedup=IntervalRow.of(times.speedup(rng)),
        decoding_speedup=decoding,
        cost_ratio=ratio,
        predicted_speedup=predicted,
        measured_over_predicted=decoding.value / predicted,
        engine_efficiency=decoding.value / reachable,
        baseline_tokens_per_s=sum(times.baseline_tokens) / sum(times.baseline_s),
        speculative_tokens_per_s=sum(times.method_tokens) / sum(times.method_s),
        block_efficiency=tau,
        acceptance_rate=times.stats.acceptance_rate,
    )
