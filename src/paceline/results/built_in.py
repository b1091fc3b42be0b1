"""The figures of Paceline: how each is made from the sums, settings and totals of a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.core import speed
from paceline.results.figures import ONE, Figure, register

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def _tau_and_gamma(
    formula: Callable[[float, int, float], float], ratio: str
) -> Callable[[float, Mapping[str, float]], float]:
    return lambda tau, facts: formula(tau, int(facts["gamma"]), facts[ratio])


BUILT_IN: Sequence[Figure] = (
    Figure(
        "expected_acceptance",
        "sum over the vocabulary of min(p, q), p the target's and q the draft's distribution; mean "
        "over tokens that the target generated",
        (("acceptance", "tokens"),),
        symbol="alpha",
        most=1.0,
    ),
    Figure(
        "greedy_draft_acceptance",
        "the target's probability of the draft's most likely token: the acceptance of an engine "
        "that drafts greedily",
        (("greedy_acceptance", "tokens"),),
        most=1.0,
    ),
    Figure(
        "greedy_agreement",
        "fraction of positions where both models have the same most likely token",
        (("agreement", "tokens"),),
        most=1.0,
    ),
    Figure(
        "block_efficiency",
        "new tokens / target calls, recovered and bonus tokens included; at most gamma + 1",
        (("emitted", "calls"),),
        label="tokens per target call",
        symbol="tau",
        most=lambda row: float(row.setting.get("gamma", math.inf)) + 1,
    ),
    Figure(
        "mbsu",
        "memory-bound speedup: tokens per target call / (c gamma + 1), where c is the parameters "
        "of the draft / those of the target",
        of="block_efficiency",
        formula=_tau_and_gamma(speed.mbsu, "parameter_ratio"),
        needs=("gamma", "parameter_ratio"),
        label="MBSU",
        symbol="tau / (c gamma + 1)",
    ),
    Figure(
        "predicted_speedup",
        "tokens per target call / (c gamma + 1), with the measured cost ratio c",
        of="block_efficiency",
        formula=_tau_and_gamma(speed.predicted_speedup, "cost_ratio"),
        needs=("gamma", "cost_ratio"),
        label="speedup by formula",
        symbol="tau / (c gamma + 1)",
    ),
    Figure(
        "cost_ratio",
        "seconds of a draft pass / seconds of a target pass, each drawing one token",
        symbol="c",
        better="less",
    ),
    Figure(
        "block_cost_ratio",
        "time of a target pass over gamma + 1 tokens / over one token",
        label="block pass",
        better="less",
    ),
    Figure(
        "needed_block_efficiency",
        "time of a block / of a target pass over one token: tokens per target call must be larger "
        "for a speedup",
        label="needed",
        better="less",
    ),
    Figure(
        "break_even_acceptance",
        "the acceptance, the same at each position, above which a block takes less time than its "
        "tokens take without a draft",
        label="break-even acceptance",
        better="less",
    ),
    Figure(
        "expected_speedup",
        "tokens per target call / the time of a whole block, drafting and verification, in target "
        "passes over one token, as timed here",
        of="block_efficiency",
        formula=lambda tau, facts: tau / facts["block_cost"],
        needs=("block_cost",),
    ),
    Figure(
        "speedup",
        "seconds per token of the target alone / of decoding with the draft, measured by turns on "
        "the same requests, prompt included",
        (("target_seconds", "target_tokens"), ("tokens", "seconds")),
        format=".2f",
    ),
    Figure(
        "decoding_speedup",
        "the speedup of the time after the first token",
        (
            (("target_seconds", "target_first_seconds"), ("target_tokens", "target_first_tokens")),
            (("tokens", "first_tokens"), ("seconds", "first_seconds")),
        ),
        format=".2f",
    ),
    Figure(
        "cross_entropy",
        "-sum over the vocabulary of p log q, p the target's and q the draft's distribution; mean "
        "over tokens that the target generated",
        (("cross_entropy", "tokens"),),
        unit="nats",
        better="less",
    ),
    Figure(
        "engine_efficiency",
        "measured decoding speedup / predicted speedup with the tokens per target call of these "
        "requests; the rest is spent on longer target passes and on work outside of passes",
        of="decoding_speedup",
        formula=lambda measured, facts: measured / facts["predicted_speedup"],
        needs=("predicted_speedup",),
    ),
    Figure(
        "tokens_per_s",
        "new tokens per second of whole requests, prompt included",
        (("tokens", "seconds"),),
        label="tokens per second",
        unit="1/s",
        format=".1f",
    ),
    Figure(
        "target_tokens_per_s",
        "new tokens per second of whole requests of the target alone, measured by turns",
        (("target_tokens", "target_seconds"),),
        label="tokens per second of the target alone",
        unit="1/s",
        format=".1f",
    ),
    Figure(
        "decoding_tokens_per_s",
        "tokens per target call / seconds of a block: new tokens per second after the first",
        of="block_efficiency",
        formula=lambda tau, facts: tau / facts["block_s"],
        needs=("block_s",),
        label="tokens per second after the first",
        unit="1/s",
        format=".1f",
    ),
    Figure(
        "acceptance_rate",
        "accepted / examined drafted tokens while decoding; examined: the accepted tokens and the "
        "first rejected one of each block",
        ((("examined", "rejected"), "examined"),),
        interval="count",
        most=1.0,
    ),
    Figure(
        "rejection_rate",
        "rejected / examined drafted tokens while decoding: 1 - acceptance rate",
        (("rejected", "examined"),),
        better="less",
        interval="count",
        most=1.0,
    ),
    Figure(
        "expected_rejection_rate",
        "rejected / examined drafted tokens of a rule, expected from the probabilities of both "
        "models along a text",
        (("expected_rejected", "expected_examined"),),
        better="less",
        most=1.0,
    ),
    Figure(
        "output_tvd",
        "total variation distance of the target's distribution and of a rule's output; mean over "
        "the tokens of a text",
        (("output_tvd", "tokens"),),
        label="output TVD",
        better="less",
        most=1.0,
    ),
    Figure(
        "output_kl",
        "Kullback-Leibler divergence of a rule's output from the target's distribution; mean over "
        "the tokens of a text",
        (("output_kl", "tokens"),),
        label="KL",
        unit="nats",
        better="less",
    ),
    Figure(
        "surprisal",
        "mean of -log p over a rule's output, p the target's distribution without temperature",
        (("surprisal", "tokens"),),
        unit="nats",
        better="less",
    ),
    Figure(
        "draft_acceptance_rate",
        "accepted / drafted tokens while decoding, the number that vLLM prints",
        (("accepted", "drafted"),),
        interval="count",
        most=1.0,
    ),
    Figure(
        "position_acceptance",
        "fraction of the blocks that accept the drafted token at a position, from 0",
        (("position_accepted", "calls"),),
        label="acceptance at the position",
        most=1.0,
    ),
    Figure(
        "g_statistic",
        "2 times the sum of observed log(observed / expected) over the cells of the G-test",
        label="G",
        better="less",
        format=".1f",
    ),
    Figure(
        "p_value",
        "how often a lossless rule has a G at least as large",
        label="p",
        format=".2g",
    ),
    Figure(
        "deferral_rate",
        "target calls / tokens, without the pass over the prompt and a token that it gives",
        (("calls", "emitted"),),
        label="target calls / tokens",
        better="less",
    ),
    Figure(
        "gain",
        "tokens per target call / those of the run's initial draft, on the same texts",
        format=".2f",
    ),
    Figure(
        "accuracy",
        "fraction of held-out tokens that are the model's most likely one",
    ),
    Figure(
        "loss",
        "cross entropy with held-out text, per token",
        label="held-out loss",
        unit="nats",
        better="less",
    ),
    Figure(
        "quality",
        "mean score of the answers",
        (("score", ONE),),
        interval="score",
        most=1.0,
    ),
    Figure(
        "relative_quality",
        "mean score of the answers / that of the target alone on the same examples",
        (("score", "target_score"),),
        interval="score",
    ),
)


for figure in BUILT_IN:
    register(figure)
