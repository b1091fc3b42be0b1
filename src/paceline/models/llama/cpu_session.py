"""Texts of a Llama-like model whose few new tokens are read, drawn and judged in one compiled call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.models.hf.session import CausalSession
from paceline.native.rule_form import native_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.block import DrawRequest, Judgement, JudgeRequest
    from paceline.core.drafted import Drafted
    from paceline.models.hf.base import HfModel
    from paceline.models.llama.cpu import NativeLlama


class CompiledSession(CausalSession):
    """As `CausalSession`, but few tokens go through the compiled pass."""

    def __init__(self, model: HfModel, native: NativeLlama) -> None:
        super().__init__(model)
        self._native = native

    def take_draw(self, request: DrawRequest) -> Drafted | None:
        batch, new = len(request.unread), len(request.unread[0])
        passes = request.plan.num_passes
        if not self._native.is_fast_for(batch * new) or not request.only_temperature or passes == 0:
            return None
        if self._native.listeners and passes > 1:
            return None
        lengths = self._longer(batch, new + passes - 1)
        drawn = self._native.draw(
            request, self.cache, [length - passes + 1 for length in lengths], self.vocab_size
        )
        self.lengths = lengths
        return drawn

    def take_judge(self, request: JudgeRequest) -> Judgement | None:
        batch, gamma = request.drafted.tokens_BG.shape
        if not self._native.is_fast_for(batch * (gamma + 1)) or not request.only_temperature:
            return None
        known = native_rule(request.asked_rule)
        if known is None:
            return None
        lengths = self._longer(batch, gamma + 1)
        judgement = self._native.judge(request, known, self.cache, lengths, self.vocab_size)
        self.lengths = lengths
        return judgement

    def _read(self, tokens_BN: Tensor, ends: Sequence[int], *, keep: int) -> Tensor:
        if not self._native.is_fast_for(tokens_BN.numel()):
            return super()._read(tokens_BN, ends, keep=keep)
        # who listens hears of all columns
        logits = self._native(tokens_BN, self.cache, ends, 0 if self._native.listeners else keep)
        return logits[:, -keep:]

    def _fresh(self) -> CompiledSession:
        return CompiledSession(self.model, self._native)
