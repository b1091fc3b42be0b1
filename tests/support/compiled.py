"""Blocks of compiled sessions, and the same blocks pass by pass."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.decode import Generation, SpeculativeDecoder
from paceline.models.contract import ModelSession
from paceline.models.llama.cpu import CompiledSession
from support.rules import VerifiesInPyTorch, using


def plainly(half: Callable[..., Any], *given: Any) -> Any:
    """As with sessions that take no whole request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledSession, "take_draw", ModelSession.take_draw)
        patch.setattr(CompiledSession, "take_verify", ModelSession.take_verify)
        return half(*given)


def texts_of(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[Generation]:
    return decoder.generate(prompts, 14, seed=[*range(len(prompts))], eos_token_ids=[])


def plain_texts_of(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[Generation]:
    """Pass by pass, and the rule in torch."""
    with using(VerifiesInPyTorch()):
        return plainly(texts_of, decoder, prompts)
