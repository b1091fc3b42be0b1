"""Checks that a server's log probabilities are the target's, before temperature and filters.

vLLM with `--logprobs-mode processed_logprobs` gives those of the distribution that it samples from.
A draft that is trained on them learns another distribution than the one that it is compared with.
"""

from __future__ import annotations

import contextlib
import math
from itertools import zip_longest
from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams
from paceline.engines.text_errors import RefusedError, processed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline.engines.contract import Request
    from paceline.engines.text_answers import Written

    Write = Callable[[Request], Awaitable[Written]]

_PLAIN = SamplingParams()
_COLD = 0.1  # temperature
_SHARP_FORMS = (
    SamplingParams(temperature=_COLD, top_k=1, top_p=0.01),
    SamplingParams(temperature=_COLD, top_p=0.01),
    SamplingParams(temperature=_COLD),
)
"""Settings to compare with `_PLAIN`: the first that the server accepts."""

TOLERANCE = 0.5
"""Largest difference of equal log probabilities, in nats.

Logits of 16 to 32 have steps of 0.125 in bfloat16, and kernels that add in another order, as for
another number of requests, move them by one or two steps. Temperature 0.1 multiplies all
differences of log probabilities by ten, and filters remove all tokens but one.
"""


async def gives_unprocessed(write: Write, request: Request, where: str) -> bool:
    """True if a server's log probabilities depend on no sampling setting; False if it is not clear.

    Compares those of one token at temperature 1 and at a low temperature with narrow filters. It is
    not clear behind a prompt for whose next token the server has no log probabilities, or the same
    ones at any temperature; then a part of the prompt is used instead.

    Raises:
        UsageError: They depend on the sampling settings.
    Cost: two requests for one token, and two more for each prompt that is not clear.
    """
    length = len(request.prompt)
    while length:
        context = request._replace(prompt=request.prompt[:length], max_new_tokens=1)
        plain = await _scores(write, context, _PLAIN)
        if _is_telling(plain):
            sharp = await _sharp_scores(write, context)
            if sharp and not _are_equal(plain, sharp):
                shown = [", ".join(f"{value:.3g}" for value in row[:3]) for row in (plain, sharp)]
                raise processed(where, f"{shown[0]} became {shown[1]} at temperature {_COLD}")
            if sharp:
                return True
        length //= 2
    return False


async def _sharp_scores(write: Write, request: Request) -> list[float]:
    for sampling in _SHARP_FORMS[:-1]:
        with contextlib.suppress(RefusedError):
            return await _scores(write, request, sampling)
    return await _scores(write, request, _SHARP_FORMS[-1])


async def _scores(write: Write, request: Request, sampling: SamplingParams) -> list[float]:
    """Log probabilities of the most likely first tokens, descending; none if there are none."""
    written = await write(request._replace(sampling=sampling))
    return [value for _, value in written.top[0]] if written.top else []


def _is_telling(plain: Sequence[float]) -> bool:
    """True if a temperature or a filter would change these by more than the tolerance."""
    if len(plain) < 2:
        return bool(plain) and plain[0] < -2 * TOLERANCE  # would become 0
    return (plain[0] - plain[-1]) * (1 / _COLD - 1) > 2 * TOLERANCE


def _are_equal(plain: Sequence[float], sharp: Sequence[float]) -> bool:
    """Compares values in order, since tokens of like probability may change places."""
    return all(
        math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
        for one, other in zip_longest(plain, sharp, fillvalue=math.nan)
    )
