"""A request of the page, and the events of decoding it with and without the draft.

With both, blocks alternate: the decoder that has used less time goes next. Each counts only its own
time, so both meet the same machine.
"""

from __future__ import annotations

import math
import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline.config import StrictModel, fields_of
from paceline.core.rules import RULES, AnyRule, Lossless, Rule
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.text import count_blocks
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from paceline.decode import Piece
    from paceline.decode.decoder import Decoder
    from paceline.models import HfModel


class PlayRequest(StrictModel):
    """What to decode, and how.

    Attributes:
        prompt: Text to continue.
        chat: Apply the chat template.
        plain: Also decode without the draft, block by block in turn.
        draft_sampling: Sampling of the draft, where it is not that of the target.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=200_000)]
    chat: bool = False
    plain: bool = True
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    seed: int = 0
    rule: Annotated[AnyRule, Field(discriminator="rule")] = Lossless()
    sampling: SamplingParams = SamplingParams()
    draft_sampling: SamplingParams | None = None


def controls(meaning_of: Callable[[type[Any], str], str]) -> dict[str, Any]:
    """The JSON schema of a request, from which the page makes its controls.

    A rule has its settings in comparisons as `examples`. `meaning_of` describes a field of a class.
    """
    schema = PlayRequest.model_json_schema()
    parts = {PlayRequest: schema}
    parts |= {kind: schema["$defs"][kind.__name__] for kind in (SamplingParams, *RULES)}
    for kind, part in parts.items():
        for name, field in part["properties"].items():
            field["description"] = meaning_of(kind, name)
        if issubclass(kind, Rule):
            names = [name for name in fields_of(kind) if name != "rule"]
            part["description"] = kind.definition or (kind.__doc__ or "").splitlines()[0]
            part["examples"] = [dict(zip(names, values, strict=False)) for values in kind.grid]
    return schema


class Run:
    """The decoding of one request.

    Attributes:
        name: Random; whoever knows it may stop the run.
        is_stopped: Set it to end the run after the current block.

    Raises:
        UsageError: the prompt cannot be decoded.
    """

    def __init__(self, target: HfModel, draft: HfModel, request: PlayRequest) -> None:
        self.name = secrets.token_hex(8)
        self.is_stopped = False
        ways: dict[str, Decoder] = {
            "draft": SpeculativeDecoder(
                *(target, draft, request.rule, request.num_speculative_tokens),
                sampling=request.sampling,
                draft_sampling=request.draft_sampling,
            )
        }
        if request.plain:
            ways["plain"] = AutoregressiveDecoder(target, request.sampling)
        prompt: Any = request.prompt
        if request.chat:
            if not (target.tokenizer and target.tokenizer.chat_template):
                raise UsageError("the target's tokenizer has no chat template; leave chat out")
            prompt = [{"role": "user", "content": prompt}]
        self._texts = {name: _Growing(way, prompt, request) for name, way in ways.items()}

    def events(self) -> Generator[dict[str, Any]]:
        """Decode; yields an event per block, and one at the end of each text."""
        yield {"kind": "begin", "run": self.name, "ways": list(self._texts)}
        growing = dict(self._texts)
        while growing and not self.is_stopped:
            name = min(growing, key=lambda each: growing[each].seconds)
            event = growing[name].next_block()
            if event is None:
                event = {"kind": "end", "reason": growing.pop(name).stop_reason}
            yield event | {"way": name}
        for name in growing:
            yield {"kind": "end", "reason": "stopped", "way": name}


class _Growing:
    """A text during generation, with its counts and the seconds that it took."""

    def __init__(self, decoder: Decoder, prompt: Any, request: PlayRequest) -> None:
        self._pieces: Iterator[Piece] = decoder.stream(prompt, request.max_new_tokens, request.seed)
        self._stops = decoder.target.eos_token_ids
        self._budget = request.max_new_tokens
        self._num_tokens = 0
        self._newest: int | None = None
        self._stats = DecodeStats()
        self.seconds = 0.0

    @property
    def stop_reason(self) -> str:
        """As `decode.text.StopReason`, of a text that has ended."""
        if self._newest in self._stops:
            return "eos"
        return "length" if self._num_tokens == self._budget else "context"

    def next_block(self) -> dict[str, Any] | None:
        """Decode a block; None after the last one."""
        start = time.perf_counter()
        first = next(self._pieces, None)
        if first is None:
            return None
        pieces = [first, *islice(self._pieces, len(first.block.tokens) - 1)]
        self.seconds += time.perf_counter() - start
        self._num_tokens += len(pieces)
        self._newest = pieces[-1].token
        self._stats += count_blocks([first.block])
        figures = {
            "tokens": self._num_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self._num_tokens / self.seconds,
            "acceptance_rate": self._stats.acceptance_rate,
            "block_efficiency": self._stats.block_efficiency,
            "target_calls": self._stats.num_target_calls,
        }
        known = {name: number for name, number in figures.items() if not math.isnan(number)}
        pairs = [(piece.text, piece.source) for piece in pieces]
        return {"kind": "block", "pieces": pairs, "figures": known}
