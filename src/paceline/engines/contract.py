"""What every engine is asked, and what it answers: text, seconds, and how its blocks went."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from paceline.config import StrictModel
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams


class BlockCounts(StrictModel):
    """Counts of an engine's blocks; they add and subtract.

    Attributes:
        num_blocks: Target passes that checked a draft.
        num_drafted: Tokens drafted.
        num_accepted: Drafted tokens that the target kept.
        accepted_by_position: Blocks whose first, second, ... drafted token was kept; None: the engine
            does not say.
    """

    num_blocks: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] | None = None

    def __sub__(self, other: BlockCounts) -> BlockCounts:
        ours, theirs = self.accepted_by_position, other.accepted_by_position
        if ours is not None:
            before = (*(theirs or ()), *[0] * len(ours))
            ours = tuple(now - then for now, then in zip(ours, before, strict=False))
        return BlockCounts(
            num_blocks=self.num_blocks - other.num_blocks,
            num_drafted=self.num_drafted - other.num_drafted,
            num_accepted=self.num_accepted - other.num_accepted,
            accepted_by_position=ours,
        )


class Request(NamedTuple):
    """One text to write; its end-of-text token is ignored, so that it has its full length."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int


class Served(NamedTuple):
    """An answer.

    Attributes:
        tokens: What was written.
        seconds: From sending the request to having the answer.
        blocks: How its blocks went; None: nothing was drafted, or the engine does not say.
    """

    tokens: list[int]
    seconds: float
    blocks: BlockCounts | None


class Engine(ABC):
    """A server that answers, one request at a time.

    Attributes:
        name: As in `measure --engine`.
        version: As it says; empty: it does not.
    """

    name: str
    version: str = ""

    @abstractmethod
    def serve(self, request: Request) -> Served:
        """Answer a request.

        Raises:
            EngineError: It did not; the message says what came instead.
        """


def checked_tokens(tokens: object, request: Request, engine: str) -> list[int]:
    """The answer's tokens, if they are as many as were asked for.

    Raises:
        EngineError: They are not.
    """
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise EngineError(
            f"{engine} answered without token numbers, so its text cannot be compared; it has to be of "
            "a version that gives them"
        )
    if len(tokens) != request.max_new_tokens:
        raise EngineError(
            f"{engine} wrote {len(tokens)} tokens where {request.max_new_tokens} were asked for, with "
            "the end of text ignored; its context may be too short, or half of the answer was lost"
        )
    return tokens
