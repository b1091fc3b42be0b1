"""Base class of transformers models.

Shape suffixes: B batch, N new tokens, W cache width, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from paceline.models.hf.architectures import context_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.contract import ModelSession
    from paceline.models.hf.cache import RoomyCache


class ForwardPass(Protocol):
    """A forward pass over new tokens."""

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all); -inf outside the draft vocabulary."""
        ...

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call `listener` with final hidden states, [B, N, D]; returns a function to remove it."""
        ...


class HfModel:
    """A transformers model and its tokenizer.

    Attributes:
        hf: The transformers model.
        tokenizer: Its tokenizer, or None.
        decoder: The forward pass of sessions.
        vocab_size: Tokens of the tokenizer; logits beyond are padding and are removed.
        max_length: Context length, None if the architecture sets no limit.
        eos_token_ids: Tokens that end a text.
        num_parameters: Distinct weights; tied ones count once.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        decoder: ForwardPass,
        start: Callable[[Any], ModelSession],
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.vocab_size = named_tokens(tokenizer, self._head.weight.shape[0])
        self.max_length = context_length(hf.config)
        self.eos_token_ids = _eos_token_ids(hf, tokenizer)
        self.num_parameters = sum(weight.numel() for weight in hf.parameters())
        self._start = start

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def start_session(self) -> ModelSession:
        return self._start(self)

    @property
    def _head(self) -> nn.Linear:
        head: Any = self.hf.get_output_embeddings()
        return head


def named_tokens(tokenizer: PreTrainedTokenizerBase | None, width: int) -> int:
    """The vocabulary size without padding, given the width of the logits."""
    if tokenizer is None:
        return width
    return min(width, max(tokenizer.get_vocab().values()) + 1)


def _eos_token_ids(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    text_config = hf.config.get_text_config(decoder=True)
    for source in (hf.generation_config, hf.config, text_config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()


@contextlib.contextmanager
def evaluating(hf: PreTrainedModel) -> Iterator[None]:
    """Switch the model to evaluation mode, and restore its mode afterwards."""
    training = hf.training
    if training:
        hf.eval()
    try:
        yield
    finally:
        if training:
            hf.train()
