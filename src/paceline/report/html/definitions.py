"""Definitions of the terms of a page, as in docs/notation.md."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """A term and its definition.

    Attributes:
        name: As in the text of a page.
        meaning: The definition.
        code: The name in code and result rows, as in docs/notation.md; may be empty.
        symbol: The symbol in the papers; may be empty.
        source: The paper; may be empty.
        link: Address of the paper; may be empty.
    """

    name: str
    meaning: str
    code: str = ""
    symbol: str = ""
    source: str = ""
    link: str = ""


_TERMS = (
    Term(
        "95% interval",
        "the range that contains the true value in 95 of 100 repetitions. It comes from resampling "
        "the independent units: prompts, examples or seeds.",
    ),
    Term(
        "speedup",
        "seconds per token of the target alone / of decoding with the draft. Both are measured, "
        "interleaved on the same requests, prompt included. Above 1 is faster.",
        "speedup",
    ),
    Term("decoding speedup", "the speedup of the time after the first token.", "decoding_speedup"),
    Term(
        "predicted speedup",
        "tokens per target call / (c gamma + 1), with the measured cost ratio c.",
        "predicted_speedup",
        "tau / (c gamma + 1)",
    ),
    Term(
        "expected speedup",
        "tokens per target call / the cost of a block in target passes, where a pass over "
        "gamma + 1 tokens costs what it costs on this machine.",
        "expected_speedup",
    ),
    Term(
        "MBSU",
        "memory-bound speedup: the predicted speedup with the draft's share of the target's "
        "parameters as the cost ratio c.",
        "mbsu",
        "tau / (c gamma + 1)",
        "Direct Alignment, section 3.2",
        "https://arxiv.org/abs/2403.00858",
    ),
    Term(
        "cost ratio",
        "seconds of a draft pass / seconds of a target pass, each drawing one token.",
        "cost_ratio",
        "c",
    ),
    Term(
        "break-even acceptance",
        "the acceptance at which tokens per target call equal the cost of a block.",
        "break_even_acceptance",
    ),
    Term("gamma", "number of tokens that the draft proposes in a block.", "gamma"),
    Term(
        "block efficiency",
        "tokens per target call, recovered and bonus tokens included; at most gamma + 1.",
        "block_efficiency",
        "tau",
    ),
    Term(
        "expected acceptance",
        "the sum over the vocabulary of min(p, q), p the target's and q the draft's distribution; "
        "a mean over tokens that the target generated. DistillSpec writes alpha, which here is "
        "the parameter of rules only.",
        "expected_acceptance",
    ),
    Term(
        "greedy draft acceptance",
        "the target's probability of the draft's most likely token: the acceptance of an engine "
        "that drafts greedily.",
        "greedy_draft_acceptance",
    ),
    Term(
        "greedy agreement",
        "fraction of positions where both models have the same most likely token.",
        "greedy_agreement",
    ),
    Term(
        "acceptance rate",
        "accepted / examined drafted tokens while decoding. Examined: the accepted tokens and the "
        "first rejected one of each block.",
        "acceptance_rate",
    ),
    Term("rejection rate", "1 - acceptance rate."),
    Term(
        "draft acceptance rate",
        "accepted / drafted tokens while decoding, the number that vLLM prints.",
        "draft_acceptance_rate",
    ),
    Term("deferral rate", "target passes / tokens, without the pass over the prompt."),
    Term("quality", "mean score of the answers."),
    Term(
        "relative quality",
        "mean score of the answers / that of the target alone on the same examples.",
    ),
    Term(
        "family",
        "an acceptance rule or decoding strategy with all its settings; a line of the plot.",
    ),
    Term(
        "lossless",
        "the text has the target's distribution. At temperature 0 it is the target's text.",
    ),
    Term("accepted", "a drafted token that the target's check kept.", "accepted, recovered, bonus"),
    Term(
        "recovered",
        "the token that replaces the first rejected token of a block, from the target's residual "
        "distribution.",
        "accepted, recovered, bonus",
    ),
    Term(
        "bonus",
        "the token after a block that was accepted completely, from the target.",
        "accepted, recovered, bonus",
    ),
    Term("G-test", "compares counts with their expectation; a chi-square test of likelihoods."),
    Term(
        "cell of the G-test",
        "a part of the vocabulary with the same probability under the target as every other part; "
        "a lossless rule puts the same number of tokens into each.",
    ),
    Term("loss", "the training objective per token."),
    Term(
        "gain",
        "block efficiency / that of the run's initial draft, on the same texts.",
    ),
    Term(
        "verdict",
        "by the claim's interval and the smallest effect that matters. A claim of more holds if "
        "the interval is above 0, and is small if the estimate is below that effect; it is too "
        "small to matter if the interval is within that effect on both sides, and does not hold if "
        "such a gain is excluded. A claim of the same holds if the interval is within that effect; "
        "a claim of no less holds if the interval is above minus that effect. Undecided: the "
        "examples do not tell.",
    ),
    Term(
        "claim's interval",
        "wider than 95%: the probability that any claim of a paper gets a wrong verdict is at most "
        "5%, however often more examples were drawn.",
    ),
    Term(
        "regret",
        "expected loss of a rule minus that of the best rule, which knows the true distribution.",
    ),
    Term(
        "dominance",
        "if one curve is above the other everywhere, its values are smaller at every rank.",
    ),
)
TERMS = {term.name: term for term in _TERMS}
