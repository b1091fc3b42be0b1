"""Interface of the engines: requests, timed answers and block counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from paceline.config import StrictModel
from paceline.core.sampling import SamplingParams
from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

DraftSampling = Literal["greedy", "probabilistic"]


class BlockCounts(StrictModel):
    """Block counts of an engine. Subtract two readings for the counts between them.

    Attributes:
        num_blocks: Target passes that verified a draft.
        num_drafted: Drafted tokens.
        num_accepted: Accepted drafted tokens.
        accepted_by_position: Blocks whose first, second, ... drafted token was accepted; None if
            the engine does not report it.
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
    """One generation request."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int


class Served(NamedTuple):
    """Answer to one request, or to several.

    Attributes:
        tokens: Generated tokens, in the order of the requests.
        seconds: From sending the request to receiving the answer; of several, the sum.
        blocks: Block counts; None or counts of 0 if the engine does not draft.
        wall_s: From the first request to the last answer; NaN where it was not taken.
    """

    tokens: list[int]
    seconds: float
    blocks: BlockCounts | None
    wall_s: float = math.nan


class Drafting(NamedTuple):
    """Drafting configuration of a server."""

    draft: str  # path or hub name
    gamma: int  # tokens drafted per block
    sampling: DraftSampling = "greedy"  # of vLLM; the other servers draft greedily
    rule: str | None = None  # for Paceline's plugin of vLLM, as JSON; None: the server's own
    parallel: bool = False  # a block from one pass, of a draft with a mask token


class Setup(NamedTuple):
    """Launch configuration of a server."""

    target: str  # path or hub name
    drafting: Drafting | None  # None: no speculative decoding
    length: int  # of the context, in tokens
    dtype: str = "auto"  # auto: the server's default
    batch_size: int = 1  # concurrent requests


class Engine(ABC):
    """An engine: what Paceline knows of it, and the connection that answers requests.

    Attributes:
        ignores_end: Generation continues after an end-of-text token, up to the full length.
        drafts_first_token: The first block starts before the target has processed the prompt.
        counts_behind_end: The last blocks draft beyond the end of the text, and count those tokens.
        counts_empty_blocks: A last block with no space left for a draft counts as a block.
    """

    name: str  # as in `measure --engine` and `export --to`
    title: ClassVar[str]  # in sentences
    in_process: ClassVar[bool] = False  # it is transformers; the others are servers
    ignores_end: ClassVar[bool] = True
    drafts_first_token: ClassVar[bool] = False
    counts_behind_end: ClassVar[bool] = False
    counts_empty_blocks: ClassVar[bool] = True
    loads_gguf: ClassVar[bool] = False  # and no directories
    samples_drafts: ClassVar[bool] = False  # if asked to, without top-k and top-p
    runs_rules: ClassVar[bool] = False  # which Paceline's plugin sets
    drafts_at_once: ClassVar[bool] = False  # parallel drafts propose a block in one pass
    always_ties: ClassVar[tuple[str, ...]] = ()  # model types whose own head it does not read
    version: str = ""  # as it reports

    @abstractmethod
    def serve(self, request: Request) -> Served:
        """Answer a request, or raise EngineError."""

    @abstractmethod
    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        """Answer requests, at most `batch_size` concurrently, or raise EngineError."""

    @classmethod
    def launch(cls, target: str, drafting: Drafting, model_class: str) -> str:
        """For a model card: a shell command, or Python code with this class of transformers."""
        del target, drafting, model_class
        return ""

    @classmethod
    def loads(cls, model: str) -> bool:
        """True if it can load the model: a GGUF file or a directory."""
        return model.endswith(".gguf") == cls.loads_gguf

    @classmethod
    def proposals(cls, drafting: DraftSampling, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters that it applies to the draft of a request with `sampling`."""
        drawn = drafting == "probabilistic"
        return SamplingParams(temperature=sampling.temperature if drawn else 0.0)


EngineClass: TypeAlias = Engine | type[Engine]


def together(served: Sequence[Served]) -> Served:
    """Combine answers that each have their own block counts, but for those by position."""
    counted = [one.blocks for one in served if one.blocks is not None]
    total = BlockCounts(
        num_blocks=sum(blocks.num_blocks for blocks in counted),
        num_drafted=sum(blocks.num_drafted for blocks in counted),
        num_accepted=sum(blocks.num_accepted for blocks in counted),
    )
    tokens = [token for one in served for token in one.tokens]
    return Served(tokens, sum(one.seconds for one in served), total if counted else None)


def checked_tokens(tokens: Sequence[int], request: Request, engine: Engine) -> list[int]:
    """Return the tokens; raises EngineError if their number is not the requested one."""
    if any(not 0 <= token < 1 << 31 for token in tokens):
        raise EngineError(f"{engine.name} answered with a token id that no vocabulary has")
    wanted = request.max_new_tokens
    if len(tokens) == wanted or (0 < len(tokens) < wanted and not engine.ignores_end):
        return list(tokens)
    raise EngineError(
        f"{engine.name} generated {len(tokens)} tokens where {wanted} were requested; its context "
        "may be too short, or part of the answer was lost"
    )


def check_counts(served: Served, gamma: int, engine: EngineClass) -> None:
    """Raise EngineError if the block counts do not match this text.

    A block yields its accepted tokens and one more, so blocks + accepted tokens is the length of
    the text, up to what the engine counts otherwise.
    """
    blocks = served.blocks
    if blocks is None:
        return
    made, count = blocks.num_blocks + blocks.num_accepted, len(served.tokens)
    least = count - 1 - (not engine.counts_empty_blocks) - (not engine.ignores_end)
    most = count + (gamma if engine.counts_behind_end else 0)
    positions = blocks.accepted_by_position
    more = positions is not None and any(positions[gamma:])
    if blocks.num_blocks < 0 or not least <= made <= most or more:
        raise EngineError(
            f"the engine counted {blocks.num_blocks} blocks with {blocks.num_accepted} accepted "
            f"tokens for a text of {count} tokens with {gamma} drafted per block; it served other "
            "requests at the same time, was restarted, or drafts another number of tokens "
            "(num_speculative_tokens)"
        )
