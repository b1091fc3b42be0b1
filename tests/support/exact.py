"""The exact distribution of decoded text, by enumerating every block in Python floats.

Nothing here comes from paceline: shaping, rules and the course of a block are written again, token
by token, so that a test compares two derivations and not one with itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from scipy.stats import chi2

Distribution = list[float]
NextToken = Callable[[tuple[int, ...]], Distribution]
"""A text so far -> the shaped distribution of its next token."""

RuleVectors = Callable[[Distribution, Distribution], tuple[Distribution, Distribution]]
"""p, q -> acceptance of each token, distribution of the recovered token."""


@dataclass(frozen=True)
class Shaping:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __call__(self, log_probs: Sequence[float], text: Collection[int]) -> Distribution:
        """Penalty, temperature, top-k, top-p; the logits of a table are its log-probabilities.

        Temperature 0 is one-hot.
        """
        size = range(len(log_probs))
        logits = [x * self.repetition_penalty if v in text else x for v, x in enumerate(log_probs)]
        if self.temperature == 0:
            return [float(v == logits.index(max(logits))) for v in size]
        weights = [math.exp(x / self.temperature) for x in logits]
        ranked = sorted(size, key=lambda v: -weights[v])[: self.top_k or None]
        total = math.fsum(weights[v] for v in ranked)
        kept, mass = set[int](), 0.0
        for v in ranked:
            if mass >= self.top_p:
                break
            kept.add(v)
            mass += weights[v] / total
        total = math.fsum(weights[v] for v in kept)
        return [weights[v] / total if v in kept else 0.0 for v in size]


def from_table(table: Sequence[Sequence[float]], order: int, shaping: Shaping) -> NextToken:
    """Look the last `order` tokens up; before the start of the text there are zeros."""
    size = len(table[0])

    @cache
    def shaped(row: int, seen: frozenset[int]) -> Distribution:
        return shaping([math.log(x) for x in table[row]], seen)

    def next_token(text: tuple[int, ...]) -> Distribution:
        row = 0
        for token in ((0,) * order + text)[-order:]:
            row = row * size + token
        return shaped(row, frozenset(text if shaping.repetition_penalty != 1 else ()))

    return next_token


def lossless(p: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
    return lossy(0.0, 1.0)(p, q)


def lossy(alpha: float, beta: float = 1.0) -> RuleVectors:
    return _rule(lambda p: p / (1 - alpha), beta)


def lenient(kind: str, epsilon: float) -> RuleVectors:
    return _rule(_relaxed(kind, epsilon), 1.0)


def lossy_at_0(alpha: float) -> RuleVectors:
    return _at_0(lambda p: p / (1 - alpha))


def lenient_at_0(kind: str, epsilon: float) -> RuleVectors:
    return _at_0(_relaxed(kind, epsilon))


def _relaxed(kind: str, epsilon: float) -> Callable[[float], float]:
    relax: dict[str, Callable[[float], float]] = {
        "linear": lambda p: p / epsilon,
        "square": lambda p: p / epsilon / epsilon,
        "exponential": lambda p: p**epsilon,
    }
    return relax[kind]


def _at_0(relaxed: Callable[[float], float]) -> RuleVectors:
    """Of the untempered p: tokens that are nearly as probable as the best one, else that one."""

    def vectors(p_raw: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
        best = p_raw.index(max(p_raw))
        accept = [float(relaxed(p) >= p_raw[best]) for p in p_raw]
        return accept, [float(v == best) for v in range(len(q))]

    return vectors


def _rule(relaxed: Callable[[float], float], beta: float) -> RuleVectors:
    def vectors(p: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
        accept = [min(1.0, relaxed(a) / b) if b else 1.0 for a, b in zip(p, q, strict=True)]
        excess = [max(0.0, a / beta - b) for a, b in zip(p, q, strict=True)]
        mass = math.fsum(excess)
        return accept, [x / mass for x in excess] if mass else p

    return vectors


def plain_texts(p: NextToken, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """Every text of the target alone with its probability."""
    texts = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in texts.items():
            for token, share in enumerate(p(prompt + text)):
                longer[(*text, token)] = mass * share
        texts = longer
    return texts


def judged_texts(
    p: NextToken,
    q: NextToken,
    judged: Callable[[tuple[int, ...], tuple[int, ...]], tuple[Distribution, Distribution]],
    *,
    gamma: int,
    prompt: tuple[int, ...],
    length: int,
    first_from_target: bool = False,
    mask: int | None = None,
) -> dict[tuple[int, ...], float]:
    """Every text with its probability.

    `judged`: acceptance and recovery of a rule, given the text and what the draft has read. `mask`:
    the draft has read it in the places of the block's tokens before.

    State: the text, the place in its block, how many tokens that block drafts. At a drafted place a
    token is kept with mass q a, or recovered with mass (1 - sum q a) r, which ends the block; at
    the bonus place it comes from p. The first block begins with the first token, or behind one of
    the target's.
    """
    State = tuple[tuple[int, ...], int, int]

    def new_block(text: tuple[int, ...]) -> State:
        if first_from_target and not text:
            return text, 0, 0
        most = max(length - len(text) - 1, 0 if text else 1)
        return text, 0, min(gamma, most)

    states: dict[State, float] = {new_block(()): 1.0}
    for _ in range(length):
        after: dict[State, float] = defaultdict(float)
        for (text, place, drafted), mass in states.items():
            if place >= drafted:
                for token, share in enumerate(p(prompt + text)):
                    after[new_block((*text, token))] += mass * share
                continue
            read = masked(prompt + text, place, mask)
            draft = q(read)
            accept, recover = judged(prompt + text, read)
            kept = [a * b for a, b in zip(draft, accept, strict=True)]
            rejected = 1 - math.fsum(kept)
            for token, (stays, comes) in enumerate(zip(kept, recover, strict=True)):
                after[((*text, token), place + 1, drafted)] += mass * stays
                after[new_block((*text, token))] += mass * rejected * comes
        states = after
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for (text, _, _), mass in states.items():
        texts[text] += mass
    return texts


def masked(text: tuple[int, ...], place: int, mask: int | None) -> tuple[int, ...]:
    """What a draft has read at a place of the block that ends a text."""
    return text if mask is None else text[: len(text) - place] + (mask,) * place


def pair_p_values(
    observed: Sequence[Sequence[int]], exact: dict[tuple[int, ...], float], width: int = 2
) -> list[float]:
    """One chi-square p-value for each pair (`width`: 2) of neighbouring places in the texts."""
    p_values: list[float] = []
    for place in reversed(range(len(observed[0]) - width + 1)):
        expected: dict[tuple[int, ...], float] = defaultdict(float)
        shorter: dict[tuple[int, ...], float] = defaultdict(float)
        for text, mass in exact.items():
            expected[text[-width:]] += mass
            shorter[text[:-1]] += mass
        counts = Counter[tuple[int, ...]](tuple(text[place : place + width]) for text in observed)
        p_values.append(chi_square_p_value(counts, expected))
        exact = shorter
    return p_values


def chi_square_p_value(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> float:
    """Pearson's test; cells that expect fewer than 5 are one cell, impossible ones are fatal."""
    assert math.isclose(math.fsum(expected.values()), 1, abs_tol=1e-9)
    total = counts.total()
    cells: list[tuple[float, int]] = []
    rare_expected, rare_counted = 0.0, 0
    for cell, probability in expected.items():
        if probability == 0:
            if counts[cell]:
                return 0.0
        elif probability * total < 5:
            rare_expected += probability * total
            rare_counted += counts[cell]
        else:
            cells.append((probability * total, counts[cell]))
    if rare_expected >= 1:
        cells.append((rare_expected, rare_counted))
    if len(cells) < 2:
        return 1.0  # one outcome, and nothing else was seen
    statistic = math.fsum((count - mean) ** 2 / mean for mean, count in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def limit(rate: float, count: int) -> float:
    """What a frequency of `count` trials exceeds with odds below 1e-4 at this rate: 4 errors."""
    return rate + 4 * math.sqrt(rate * (1 - rate) / count)


Texts = dict[tuple[int, ...], float]
Aim = Callable[[Distribution, Distribution, Distribution, Distribution], Distribution]
"""p, q, untempered p, untempered q -> pi."""
Vectors = Callable[..., tuple[Distribution, Distribution]]
"""The same four -> acceptance of each token, distribution of the recovered token."""


class Models(NamedTuple):
    """Shaped and untempered distributions of target and draft behind a text."""

    p: NextToken
    q: NextToken
    p_raw: NextToken
    q_raw: NextToken

    def __call__(self, text: tuple[int, ...]) -> tuple[Distribution, ...]:
        return self.p(text), self.q(text), self.p_raw(text), self.q_raw(text)


def entropy(probs: Distribution) -> float:
    return -math.fsum(x * math.log(x) for x in probs if x)


def tvd(p: Distribution, q: Distribution) -> float:
    return math.fsum(max(0.0, a - b) for a, b in zip(p, q, strict=True))


def surprise(q: Distribution, p_raw: Distribution) -> float:
    """Infinite if p is 0 where q is not."""
    pairs = [(a, b) for a, b in zip(q, p_raw, strict=True) if a]
    return -math.fsum(a * math.log(b) for a, b in pairs) if all(b for _, b in pairs) else math.inf


def binary(defers: Callable[..., bool]) -> Aim:
    return lambda p, q, p_raw, q_raw: p if defers(p, q, p_raw, q_raw) else q


def token_wise(gives_up: Callable[[float, float, float], bool]) -> Aim:
    """`gives_up`: untempered p(v), untempered q(v), max p."""

    def aim(
        p: Distribution, q: Distribution, p_raw: Distribution, q_raw: Distribution
    ) -> Distribution:
        pairs = zip(p_raw, q_raw, strict=True)
        lost = [gives_up(a, b, max(p_raw)) for a, b in pairs]
        mass = math.fsum(b for b, gone in zip(q, lost, strict=True) if gone)
        rows = zip(p, q, lost, strict=True)
        return [mass * a + (0.0 if gone else b) for a, b, gone in rows]

    return aim


def tuned_lossy(alpha: float) -> Aim:
    """beta by bisection in double precision; at temperature 0 what is kept, and the best token."""

    def aim(
        p: Distribution, q: Distribution, p_raw: Distribution, q_raw: Distribution
    ) -> Distribution:
        if max(p) == 1 > max(p_raw):
            kept = [
                b if a / (1 - alpha) >= max(p_raw) else 0 for a, b in zip(p_raw, q, strict=True)
            ]
            return [a + b * (1 - math.fsum(kept)) for a, b in zip(kept, p, strict=True)]
        pairs = list(zip(p, q, strict=True))
        rejected = math.fsum(max(0.0, b - a / (1 - alpha)) for a, b in pairs)
        low, high = 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            recovered = math.fsum(max(0.0, a * middle - b) for a, b in pairs)
            low, high = (low, middle) if recovered > rejected else (middle, high)
        return [max(min(b, a / (1 - alpha)), a * low) for a, b in pairs]

    return aim


AIMS: dict[str, Callable[[float], Aim]] = {
    "bild": lambda a: binary(lambda p, q, p_raw, q_raw: surprise(q, p_raw) > a),
    "chow": lambda a: binary(lambda p, q, p_raw, q_raw: max(q_raw) < 1 - a),
    "chow_log": lambda a: binary(lambda p, q, p_raw, q_raw: entropy(q_raw) > a),
    "diff": lambda a: binary(lambda p, q, p_raw, q_raw: max(q_raw) < max(p_raw) - a),
    "diff_log": lambda a: binary(lambda p, q, p_raw, q_raw: entropy(p_raw) + a < entropy(q_raw)),
    "opt": lambda a: binary(lambda p, q, p_raw, q_raw: max(q_raw) < max(p_raw) - a * tvd(p, q)),
    "opt_log": lambda a: binary(
        lambda p, q, p_raw, q_raw: entropy(p_raw) + a * tvd(p, q) < entropy(q_raw)
    ),
    "token_v1": lambda a: token_wise(lambda p, q, peak: q < peak - a),
    "token_v2": lambda a: token_wise(lambda p, q, peak: p < peak - a),
    "token_v3": lambda a: token_wise(lambda p, q, peak: p < (1 - a) * peak),
    "tuned": tuned_lossy,
}


def aimed_vectors(aim: Aim) -> Vectors:
    """Keeps with min(1, pi/q), and recovers from norm((pi - q)_+)."""
    return lambda p, q, *raw: lossless(aim(p, q, *raw), q)


def near(vectors: RuleVectors) -> Vectors:
    """Of p and q alone."""
    return lambda p, q, *_: vectors(p, q)


def target_bonus_texts(
    models: Models, vectors: Vectors, *, gamma: int, prompt: tuple[int, ...], length: int
) -> Texts:
    """The first token and every bonus token from p; drafted places follow the rule."""

    @cache
    def judged(text: tuple[int, ...], _read: Any) -> tuple[Distribution, Distribution]:
        return vectors(*models(text))

    blocks = {"gamma": gamma, "prompt": prompt, "length": length}
    return judged_texts(models.p, models.q, judged, **blocks, first_from_target=True)
