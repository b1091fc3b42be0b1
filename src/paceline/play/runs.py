"""A request of the page, and the events of decoding it.

Probabilities are read in other passes, whose time is not counted: the decoder's may return none.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

from paceline.config import StrictModel, fields_of
from paceline.core.rule_base import name_of
from paceline.core.rules import RULES, AnyRule, Lossless
from paceline.core.sampling import SamplingParams, to_probs
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.text import count_blocks
from paceline.decode.text_prompts import as_tokens
from paceline.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from paceline.decode import Piece
    from paceline.decode.decoder import Decoder
    from paceline.models import HfModel
    from paceline.models.contract import Model


class PlayRequest(StrictModel):
    """What to decode, and how; `plain`: without the draft."""

    prompt: Annotated[str, Field(min_length=1, max_length=200_000)]
    chat: bool = False
    plain: bool = False
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    seed: int = 0
    rule: Annotated[AnyRule, Field(discriminator="rule")] = Lossless()
    temperature: Annotated[float, Field(ge=0)] = 1.0


def rules() -> list[dict[str, Any]]:
    """Each built-in rule: its name, definition, and the middle of its settings in comparisons."""
    found: list[dict[str, Any]] = []
    for kind in RULES:
        names = [name for name in fields_of(kind) if name != "rule"]
        settings = dict(zip(names, kind.grid[len(kind.grid) // 2], strict=False))
        about = kind.definition or (kind.__doc__ or "").splitlines()[0]
        found.append({"rule": name_of(kind), "about": about, "settings": settings})
    return found


def decoded(target: HfModel, draft: HfModel, request: PlayRequest) -> Generator[dict[str, Any]]:
    """Yields the tokens of each block, and the figures so far. Raises UsageError at the first."""
    prompt: Any = [{"role": "user", "content": request.prompt}] if request.chat else request.prompt
    sampling = SamplingParams(temperature=request.temperature)
    gamma = request.num_speculative_tokens
    decoder = SpeculativeDecoder(target, draft, request.rule, gamma, sampling)
    pair = {"target": target, "draft": draft}
    readers = {name: _Reader(model, decoder, prompt) for name, model in pair.items()}
    if request.plain:
        decoder, readers = AutoregressiveDecoder(target, sampling), {}
    pieces = decoder.stream(prompt, request.max_new_tokens, request.seed)
    stats, seconds = DecodeStats(), 0.0
    start = time.perf_counter()
    for first in pieces:
        block = [first, *islice(pieces, len(first.block.tokens) - 1)]
        seconds += time.perf_counter() - start
        stats += count_blocks([first.block])
        num_tokens = stats.num_prefill_tokens + stats.num_emitted
        figures = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
        if stats.num_target_calls:
            figures += f", {stats.block_efficiency:.2f} tokens per target call"
        if stats.num_examined:
            counts = f"{stats.num_accepted} of {stats.num_examined} examined draft tokens"
            figures += f", acceptance {stats.acceptance_rate:.3f} ({counts})"
        yield {"tokens": _tokens(block, target.tokenizer, readers), "figures": figures}
        start = time.perf_counter()


def _tokens(
    pieces: list[Piece], tokenizer: Any, readers: dict[str, _Reader]
) -> list[dict[str, Any]]:
    """The tokens of a block, with the rejected ones where they were drafted."""
    kept = [_shown(piece.token, piece.text, piece.source) for piece in pieces]
    behind = pieces[0].block.rejected
    rejected = [_shown(token, tokenizer.decode([token]), "unexamined") for token in behind]
    for one in rejected[:1]:
        one["source"] = "rejected"
    for name, reader in list(readers.items()):
        try:
            probs_NV = reader.read([one.token for one in pieces])
        except ContextLengthError:  # the draft has no room for the text
            del readers[name]
            continue
        # the token that replaces a rejected one is the last, at the same position
        for probs_V, one in zip([*probs_NV, probs_NV[-1]], [*kept, *rejected[:1]], strict=False):
            one[name] = float(probs_V[one["id"]])
    return [*kept[:-1], *rejected, kept[-1]]


def _shown(token: int, text: str, source: str) -> dict[str, Any]:
    return {"id": token, "text": text, "source": source}


class _Reader:
    """The distributions of a model at the tokens of a text."""

    def __init__(self, model: Model, decoder: Decoder, prompt: Any) -> None:
        self._session = model.start_session()
        self._session.vocab_size = decoder.vocab_size
        # at temperature 0 they would be 0 or 1
        self._sampling = SamplingParams(temperature=decoder.sampling.temperature or 1)
        self._prompt = as_tokens(prompt, decoder.target, "the prompt")

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """The distributions of these tokens, which follow those read before, [N, V]."""
        if not self._session.lengths:
            self._newest_1V = self._session.prefill([self._prompt])
        logits_NV = torch.cat([self._newest_1V, self._session.extend(torch.tensor([tokens]))[0]])
        self._newest_1V = logits_NV[-1:]
        return to_probs(logits_NV[:-1], self._sampling)
