"""Texts at the borders of the intervals that their law gives to each decision.

A decoder turns three streams of numbers in [0, 1) into a text. A law says for each decision (which
token is drafted, whether it is kept, which one comes in its place or behind the block) which
interval of its number gives which outcome. `walk` chooses outcomes at random, also rare ones, and
for each a number next to one end of its interval, or within; a decoder with these numbers
must write the text of the walk. So nothing is sampled: a decision whose share is wrong by more
than the margin, some millionths, writes another text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

from paceline.decode import text as texts
from paceline.decode.decoder import Decoder
from paceline.decode.draft_policies import DraftPolicy
from support import exact

MARGIN = 2e-6
LAST = math.nextafter(1, 0)


@dataclass(frozen=True)
class Law:
    """What a text follows; the first names are those of `exact.judged_texts`.

    gamma 0: the target alone. `aim`: of the bonus token; None: it follows p. The length of a block
    is the policy's affair, and no decision of the text's law.
    """

    def given(self, context: tuple[int, ...], place: int) -> tuple[exact.Distribution, ...]:
        """p, q, untempered p and q at a place of the block that ends `context`.

        A parallel draft has read masks at the places before it.
        """
        p, q, p_raw, q_raw = self.models
        read = exact.masked(context, place, self.mask)
        return p(context), q(read), p_raw(context), q_raw(read)

    models: exact.Models
    vectors: exact.Vectors
    gamma: int
    length: int
    aim: exact.Aim | None = None
    first_from_target: bool = False
    room: int | None = None
    mask: int | None = None  # of a parallel draft
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    margin: float = MARGIN  # more for models that round more


@dataclass
class Path:
    """A text, and the numbers that lead to it."""

    prompt: tuple[int, ...]
    text: tuple[int, ...] = ()
    draft: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)
    choose: list[float] = field(default_factory=list)


def _within(low: float, high: float, margin: float, rng: Random) -> float:
    """Next to an end, or between them; beyond 0 and 1 there is nothing to keep away from."""
    ends = 0.0 if low == 0 else low + margin, LAST if high > LAST else high - margin
    return rng.choice((*ends, (low + high) / 2))


def _chosen(
    probs: exact.Distribution, numbers: list[float], rng: Random, margin: float = MARGIN
) -> int:
    token = rng.choice([v for v, share in enumerate(probs) if share > 3 * margin])
    low, high = math.fsum(probs[:token]), math.fsum(probs[: token + 1])
    ends = low if any(probs[:token]) else 0.0, high if any(probs[token + 1 :]) else 1.0
    numbers.append(_within(*ends, margin, rng))
    return token


def _kept(share: float, numbers: list[float], rng: Random, margin: float) -> bool:
    keeps = share > 3 * margin and (share > 1 - 3 * margin or rng.random() < 0.5)
    numbers.append(_within(*((0.0, share) if keeps else (share, 1.0)), margin, rng))
    return keeps


def walk(law: Law, prompt: tuple[int, ...], rng: Random) -> Path:
    """A path to a text of `law.length` tokens; each block takes gamma, gamma and one number."""
    path, context = Path(prompt), prompt
    num_kept = num_judged = 0
    if law.first_from_target:
        context = (*prompt, _chosen(law.models.p(prompt), path.choose, rng, law.margin))
    while (written := len(context) - len(prompt)) < law.length:
        numbers = path.draft, path.accept
        filled = len(path.draft) + law.gamma
        most = min(law.gamma, max(law.length - written - 1, 0 if written else 1))
        begin = len(context)
        alone = law.room is not None and len(context) + law.gamma > law.room
        if alone or law.gamma == 0:
            most = 0
        elif most:
            most = law.policy.length(num_kept, num_judged, most)
        rejected = False
        for place in range(most):
            given = law.given(context, place)
            if not law.policy.goes_on(max(given[3])):
                break
            token = _chosen(given[1], path.draft, rng, law.margin)
            accept, recover = law.vectors(*given)
            num_judged += 1
            if _kept(accept[token], path.accept, rng, law.margin):
                num_kept += 1
                context = (*context, token)
                continue
            # what is left of p - q in float32, where little is left
            mass = 1 - math.fsum(a * b for a, b in zip(accept, given[1], strict=True))
            margin = law.margin + law.margin / 4 / mass
            context = (*context, _chosen(recover, path.choose, rng, margin))
            rejected = True
            break
        if not rejected:
            given = law.given(context, len(context) - begin)
            behind = given[0] if law.aim is None or alone else law.aim(*given)
            context = (*context, _chosen(behind, path.choose, rng, law.margin))
        for stream in numbers:
            stream += [rng.random() for _ in range(filled - len(stream))]
    path.text = context[len(prompt) :][: law.length]
    return path


def walk_while_sure(
    models: exact.Models,
    prompt: tuple[int, ...],
    length: int,
    rng: Random,
    *,
    sure: float,
    most: int,
    rollback: float | None,
) -> Path:
    """TokenCascade (rollback None) and BiLD, draft by draft.

    A draft goes on while max q >= sure, for at most `most` tokens. One that fills the text is kept
    as it is. Else the target takes back from the first place where its surprise exceeds `rollback`
    and gives one token there, or behind the last.
    """
    path = Path(prompt)
    while (written := len(path.text)) < length:
        filled = len(path.draft) + most
        draft = start = prompt + path.text
        while (
            len(draft) - len(start) < min(most, length - written)
            and max(models.q_raw(draft)) >= sure
        ):
            draft = (*draft, _chosen(models.q(draft), path.draft, rng))
        path.draft += [rng.random() for _ in range(filled - len(path.draft))]
        path.accept += [rng.random() for _ in range(most)]
        if len(draft) - len(prompt) < length:
            places = range(len(start), len(draft))
            taken = (place for place in places if _surprises(models, draft[:place], rollback))
            draft = draft[: next(taken, len(draft))]
            draft = (*draft, _chosen(models.p(draft), path.choose, rng))
        path.text = draft[len(prompt) :]
    return path


def _surprises(models: exact.Models, text: tuple[int, ...], rollback: float | None) -> bool:
    return rollback is not None and exact.surprise(models.q(text), models.p_raw(text)) > rollback


def walk_whole(
    models: exact.Models,
    prompt: tuple[int, ...],
    length: int,
    rng: Random,
    *,
    alpha: float,
    normalise: bool,
) -> Path:
    """A sequence cascade: the draft's text where it is probable enough, else the target's own."""
    path, probability = Path(prompt), 1.0
    for _ in range(length):
        token = _chosen(models.q(prompt + path.text), path.draft, rng)
        probability *= models.q_raw(prompt + path.text)[token]
        path.text += (token,)
    if probability ** (1 / length if normalise else 1) < 1 - alpha:
        path.text = ()
        for _ in range(length):
            path.text += (_chosen(models.p(prompt + path.text), path.choose, rng),)
    return path


def walks(law: Law, prompts: Sequence[tuple[int, ...]], count: int) -> list[Path]:
    """`count` paths behind these prompts by turns."""
    vectors, aim = _cached(law.vectors), law.aim and _cached(law.aim)
    law, rng = replace(law, vectors=vectors, aim=aim), Random(0)
    return [walk(law, prompts[row % len(prompts)], rng) for row in range(count)]


def _cached(function: Callable[..., Any]) -> Callable[..., Any]:
    found = cache(lambda *given: function(*map(list, given)))
    return lambda *given: found(*map(tuple, given))


def num_wrong(decoder: Decoder, paths: Sequence[Path], batch_size: int | None = None) -> int:
    """How many paths the decoder leaves, given their numbers.

    A text that has left its path may take more of them, and gets halves.
    """

    class Streams(texts._Uniforms):
        def __init__(self, seed: int, name: str) -> None:
            self._drawn = getattr(paths[seed], name) + [0.5] * 100

    with patch.object(texts, "_Uniforms", Streams):
        found = decoder.generate(
            [list(path.prompt) for path in paths],
            len(paths[0].text),
            seed=list(range(len(paths))),
            eos_token_ids=[],
            batch_size=batch_size,
        )
    return sum(tuple(one.tokens) != path.text for one, path in zip(found, paths, strict=True))
