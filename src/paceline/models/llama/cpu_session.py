"""Sessions of Llama-like models on the CPU: a pass over few tokens is one call into C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.rules import Lossless
from paceline.models.hf.cache import RoomyCache, RoomyLayer
from paceline.models.hf.causal import CausalSession, HfDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from paceline.core.block import Drafted, DrawRequest, VerifiedRows, VerifyRequest
    from paceline.core.sampling import SamplingParams
    from paceline.models.hf.base import HfModel
    from paceline.models.llama.cpu import NativeLlama


class PromptPass(HfDecoder):
    """The pass of transformers for many tokens; its listeners hear the compiled pass, too."""

    def __init__(
        self, hf: PreTrainedModel, draft_vocabulary: Tensor | None, native: NativeLlama
    ) -> None:
        super().__init__(hf, draft_vocabulary)
        self.native = native

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        remove = super().listen(listener)
        self.native.listeners.append(listener)

        def stop() -> None:
            remove()
            self.native.listeners.remove(listener)

        return stop


class FloatLayer(RoomyLayer):
    """Keeps keys and values in float32, as the compiled pass does, also of a bfloat16 model."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states.float(), value_states.float())
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class CompiledSession(CausalSession):
    """A `CausalSession` that uses the compiled pass for few tokens."""

    def __init__(self, model: HfModel, native: NativeLlama) -> None:
        super().__init__(model)
        self.cache = RoomyCache(FloatLayer)
        self._native = native

    def take_draw(self, request: DrawRequest) -> Drafted | None:
        batch, new = len(request.unread), len(request.unread[0])
        passes = request.plan.num_passes
        if not self._serves(request, request.plan.sampling, batch * new):
            return None
        if passes == 0:
            return None
        lengths = self._extended_lengths(batch, new + passes - 1)
        begins = [length - passes + 1 for length in lengths]
        drawn = self._native.draw(request, self.cache, begins, self.vocab_size)
        self.lengths = lengths
        return drawn

    def take_verify(self, request: VerifyRequest) -> VerifiedRows | None:
        batch, gamma = request.drafted.tokens_BG.shape
        served = self._serves(request, request.sampling, batch * (gamma + 1))
        if not served or type(request.applied_rule) is not Lossless:
            return None
        lengths = self._extended_lengths(batch, gamma + 1)
        verified = self._native.verify(request, self.cache, lengths, self.vocab_size)
        self.lengths = lengths
        return verified

    def _read(self, tokens_BN: Tensor, ends: Sequence[int], *, keep: int) -> Tensor:
        if tokens_BN.numel() > self._native.most_tokens:
            return super()._read(tokens_BN, ends, keep=keep)
        # listeners receive all columns
        logits = self._native(tokens_BN, self.cache, ends, 0 if self._native.listeners else keep)
        return logits[:, -keep:]

    def _fresh(self) -> CompiledSession:
        return CompiledSession(self.model, self._native)

    def _serves(
        self, request: DrawRequest | VerifyRequest, sampling: SamplingParams, num_tokens: int
    ) -> bool:
        """Whether so few tokens are read fast, and no filter or penalty changes the logits.

        Greedy tokens are the same with filters. Listeners hear of passes that PyTorch draws from.
        """
        if self._native.listeners:
            return False
        no_filter = request.uniforms is None or sampling.greedy or sampling.only_temperature
        return num_tokens <= self._native.most_tokens and request.seen_BV is None and no_filter
