"""What texts of cascades follow, by enumeration in Python floats; nothing comes from paceline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from exact import Distribution, NextToken, judged_texts

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

    def vectors(
        p: Distribution, q: Distribution, p_raw: Distribution, q_raw: Distribution
    ) -> tuple[Distribution, Distribution]:
        pairs = list(zip(aim(p, q, p_raw, q_raw), q, strict=True))
        excess = [max(0.0, a - b) for a, b in pairs]
        mass = math.fsum(excess)
        return [min(1.0, a / b) if b else 1.0 for a, b in pairs], [
            x / mass for x in excess
        ] if mass else p

    return vectors


def target_bonus_texts(
    models: Models, vectors: Vectors, *, gamma: int, prompt: tuple[int, ...], length: int
) -> Texts:
    """The first token and every bonus token from p; drafted places follow the rule."""

    @cache
    def judged(text: tuple[int, ...]) -> tuple[Distribution, Distribution]:
        return vectors(*models(text))

    blocks = {"gamma": gamma, "prompt": prompt, "length": length}
    return judged_texts(models.p, models.q, judged, **blocks, first_from_target=True)


def aimed_texts(models: Models, aim: Aim, prompt: tuple[int, ...], length: int) -> Texts:
    """Every token from pi, the first one too, wherever blocks begin and end."""

    @cache
    def pi(*given: tuple[float, ...]) -> Distribution:
        return aim(*map(list, given))

    texts: Texts = {(): 1.0}
    for _ in range(length):
        longer: Texts = {}
        for text, mass in texts.items():
            for token, share in enumerate(pi(*map(tuple, models(prompt + text)))):
                if share:
                    longer[(*text, token)] = mass * share
        texts = longer
    return texts


def block_texts(
    models: Models,
    prompt: tuple[int, ...],
    length: int,
    *,
    sure: float,
    most: int,
    rollback: float | None,
) -> Texts:
    """TokenCascade (rollback None) and BiLD, draft by draft.

    A draft goes on while max q >= sure, for at most `most` tokens. One that fills the text is kept
    as it is. Else the target takes back from the first place where its surprise exceeds `rollback`
    and gives one token there, or behind the last.
    """
    finished: Texts = defaultdict(float)
    starts: Texts = {(): 1.0}
    for _ in range(length):
        later: Texts = defaultdict(float)
        for start, mass in starts.items():
            for draft, share in _drafts(models, prompt + start, length - len(start), sure, most):
                if len(start) + len(draft) == length:
                    finished[start + draft] += mass * share
                    continue
                kept = _num_kept(models, prompt + start, draft, rollback)
                text = start + draft[:kept]
                for token, chance in enumerate(models.p(prompt + text)):
                    whole = len(text) + 1 == length
                    (finished if whole else later)[(*text, token)] += mass * share * chance
        starts = later
    return finished


def _drafts(
    models: Models, context: tuple[int, ...], room: int, sure: float, most: int
) -> list[tuple[tuple[int, ...], float]]:
    """Every draft from here, with its probability."""
    open_drafts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    closed: list[tuple[tuple[int, ...], float]] = []
    while open_drafts:
        draft, mass = open_drafts.pop()
        whole = len(draft) == min(most, room)
        if whole or max(models.q_raw(context + draft)) < sure:
            closed.append((draft, mass))
            continue
        shares = enumerate(models.q(context + draft))
        open_drafts += [((*draft, token), mass * share) for token, share in shares if share]
    return closed


def _num_kept(
    models: Models, context: tuple[int, ...], draft: tuple[int, ...], rollback: float | None
) -> int:
    for place in range(len(draft)):
        behind = context + draft[:place]
        if rollback is not None and surprise(models.q(behind), models.p_raw(behind)) > rollback:
            return place
    return len(draft)


def sequence_texts(
    models: Models, prompt: tuple[int, ...], length: int, alpha: float, *, normalise: bool
) -> Texts:
    """The draft's text where it is probable enough, else the target's own."""
    ours = _plain(models.q, prompt, length)
    kept = {
        text: mass
        for text, mass in ours.items()
        if _score(models, prompt, text, normalise) >= 1 - alpha
    }
    deferred = 1 - math.fsum(kept.values())
    theirs = _plain(models.p, prompt, length)
    return {text: kept.get(text, 0.0) + deferred * mass for text, mass in theirs.items()}


def _score(
    models: Models, prompt: tuple[int, ...], text: tuple[int, ...], normalise: bool
) -> float:
    product = math.prod(
        models.q_raw(prompt + text[:place])[token] for place, token in enumerate(text)
    )
    return product ** (1 / len(text)) if normalise else product


def _plain(model: NextToken, prompt: tuple[int, ...], length: int) -> Texts:
    texts: Texts = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): mass * share
            for text, mass in texts.items()
            for token, share in enumerate(model(prompt + text))
        }
    return texts
