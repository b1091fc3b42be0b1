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
    """Counts of an engine's blocks; a later reading minus an earlier one is what happened between.

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
    """One text to write."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int


class Served(NamedTuple):
    """An answer.

    Attributes:
        tokens: What was written.
        seconds: From sending the request to having the answer.
        blocks: How its blocks went; None: the engine does not draft.
    """

    tokens: list[int]
    seconds: float
    blocks: BlockCounts | None


class Together(NamedTuple):
    """Answers to several requests.

    Attributes:
        tokens: What was written for each.
        seconds: From sending each to having its answer.
        blocks: Of all of them; None: the engine does not draft.
    """

    tokens: list[list[int]]
    seconds: list[float]
    blocks: BlockCounts | None


class Conventions(NamedTuple):
    """What an engine drafts and counts, and where that differs from a textbook's block.

    Attributes:
        ignores_end: Requests ask to go on behind an end-of-text token, so each text has its full
            length.
        drafts_first_token: Its first block starts before the target has read the prompt.
        counts_behind_end: Its last blocks draft beyond the end of the text, and their tokens count.
        counts_empty_blocks: A last block that has no room for a draft counts as a block.
    """

    ignores_end: bool = True
    drafts_first_token: bool = False
    counts_behind_end: bool = False
    counts_empty_blocks: bool = True


class Engine(ABC):
    """What answers requests.

    Attributes:
        name: As in `measure --engine`.
        version: As it reports; empty if it does not.
        conventions: How it counts.
    """

    name: str
    version: str = ""
    conventions: Conventions = Conventions()

    @abstractmethod
    def serve(self, request: Request) -> Served:
        """Answer a request.

        Raises:
            EngineError: It did not; the message says what came instead.
        """

    @abstractmethod
    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Together:
        """Answer requests, at most `batch_size` at a time; the next is sent when one is answered.

        Raises:
            EngineError: It did not answer one of them.
        """


def together(served: Sequence[Served]) -> Together:
    """Answers that each have their own counts, as one."""
    counted = [one.blocks for one in served if one.blocks is not None]
    total = BlockCounts(
        num_blocks=sum(blocks.num_blocks for blocks in counted),
        num_drafted=sum(blocks.num_drafted for blocks in counted),
        num_accepted=sum(blocks.num_accepted for blocks in counted),
    )
    return Together(
        [one.tokens for one in served],
        [one.seconds for one in served],
        total if counted else None,
    )


def checked_tokens(tokens: Sequence[int], request: Request, engine: Engine) -> list[int]:
    """The answer's tokens, if they are as many as they can be.

    Raises:
        EngineError: They are not.
    """
    wanted = request.max_new_tokens
    if len(tokens) == wanted or (0 < len(tokens) < wanted and not engine.conventions.ignores_end):
        return list(tokens)
    raise EngineError(
        f"{engine.name} wrote {len(tokens)} tokens where {wanted} were requested; its context may be "
        "too short, or part of the answer was lost"
    )


def check_counts(served: Served, gamma: int, conventions: Conventions) -> None:
    """Do the counts belong to this text alone?

    A block gives its accepted tokens and one more, so blocks and accepted tokens together make the text.

    Raises:
        EngineError: They do not.
    """
    blocks = served.blocks
    if blocks is None:
        return
    made, count = blocks.num_blocks + blocks.num_accepted, len(served.tokens)
    least = count - 1 - (not conventions.counts_empty_blocks) - (not conventions.ignores_end)
    most = count + (gamma if conventions.counts_behind_end else 0)
    positions = blocks.accepted_by_position
    more = positions is not None and any(positions[gamma:])
    if blocks.num_blocks < 0 or not least <= made <= most or more:
        raise EngineError(
            f"the engine counted {blocks.num_blocks} blocks with {blocks.num_accepted} accepted tokens "
            f"while it wrote {count} tokens with {gamma} drafted per block; it served other requests at "
            "the same time, was restarted, or drafts another number of tokens "
            "(num_speculative_tokens)"
        )
