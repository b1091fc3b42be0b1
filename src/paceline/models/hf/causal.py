"""Decoder-only transformers models: sessions for decoding, hidden states for training.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.vocabulary_subset import limited
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.contract import Texts
from paceline.models.hf.architectures import refuse_by_name
from paceline.models.hf.base import HfModel, evaluating
from paceline.models.hf.rollback import check_rollback
from paceline.models.hf.session import CausalSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.contract import Batch, ModelSession
    from paceline.models.hf.base import ForwardPass
    from paceline.models.hf.cache import RoomyCache


class CausalModel(HfModel):
    """A decoder-only model and its tokenizer; see `HfModel` for its other attributes.

    Attributes:
        draft_vocabulary: The only tokens that sessions may sample, most likely first, [K]; None for
            all. It also makes the head of Llama-like models smaller.
        weight_change: Maximum rounding error of a weight after `prepare_for_decoding`, relative to
            the largest weight of its matrix.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_vocabulary: Tensor | None = None,
        decoder: ForwardPass | None = None,
        start: Callable[[Any], ModelSession] = CausalSession,
    ) -> None:
        """`decoder` and `start` are a forward pass and the sessions that use it: see prepare.py."""
        super().__init__(hf, tokenizer, decoder or HfDecoder(hf, draft_vocabulary), start)
        self.draft_vocabulary = draft_vocabulary
        self.weight_change = 0.0

    def without_draft_vocabulary(self) -> CausalModel:
        """The same model without the restriction, as engines that ignore the list run it."""
        if self.draft_vocabulary is None:
            return self
        return CausalModel(self.hf, self.tokenizer)

    @property
    def head_weight(self) -> Tensor:
        """Output projection, [V, D], padding rows included.

        logits = hidden @ head_weight^T + head_bias.

        Raises:
            UnsupportedModelError: The model scales or caps its logits after the projection.
            ModelLoadError: Its logits are not finite.
        """
        if not self._logits_are_projected:
            raise UnsupportedModelError(
                f"{self.hf.config.model_type} scales or caps its logits after the output "
                "projection, which only decoding supports; choose another model to train or score"
            )
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self._head, "bias", None)

    @functools.cached_property
    def _logits_are_projected(self) -> bool:
        tokens = torch.ones(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode(), evaluating(self.hf):
            wanted = self.hf(input_ids=tokens, use_cache=False).logits.float()
            got = F.linear(self.hidden(Texts(tokens)), self._head.weight, self.head_bias).float()
        if not bool(wanted.isfinite().all()):
            raise ModelLoadError(
                f"the logits of this {self.hf.config.model_type} are NaN or infinite; its weights "
                "are damaged: copy or create it again"
            )
        return float((wanted - got).abs().max()) <= 0.01 * float(wanted.abs().max())

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm, [B, T, D]. Differentiable."""
        return self.hf.base_model(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_BT, use_cache=False
        ).last_hidden_state


class HfDecoder:
    """The forward pass of transformers."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        self.hf = hf
        self.draft_vocabulary = draft_vocabulary

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        # without padding, most models are faster without mask and positions
        ragged = {} if ends_B is None else _mask_and_positions(ends_B, tokens_BN)
        logits = self.hf(
            input_ids=tokens_BN,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            **ragged,
        ).logits
        return logits if self.draft_vocabulary is None else limited(logits, self.draft_vocabulary)

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        return self.hf.base_model.register_forward_hook(
            lambda _module, _inputs, output: listener(output.last_hidden_state)
        ).remove


def _mask_and_positions(ends_B: Tensor, tokens_BN: Tensor) -> dict[str, Tensor]:
    count, device = tokens_BN.shape[1], tokens_BN.device
    width = int(ends_B.max())
    mask_BW = torch.arange(width) >= (width - ends_B)[:, None]
    positions_BN = (ends_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }


def wrap_model(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_vocabulary: Tensor | None = None,
) -> CausalModel:
    """Wrap a transformers model as a Paceline model.

    `draft_vocabulary` lists the only tokens it may propose, most likely first, [K]; None for all.

    Raises:
        UnsupportedModelError: The architecture cannot roll back.
    """
    refuse_by_name(hf_model.config)
    if not isinstance(hf_model.get_output_embeddings(), nn.Module):
        raise UnsupportedModelError(
            f"{type(hf_model).__name__} has no output head; load it with AutoModelForCausalLM"
        )
    if draft_vocabulary is not None:
        draft_vocabulary = draft_vocabulary.to(hf_model.device)
    check_rollback(CausalModel(hf_model, tokenizer))  # compares the logits of all tokens
    return CausalModel(hf_model, tokenizer, draft_vocabulary=draft_vocabulary)


@contextlib.contextmanager
def recorded_hidden_states(model: CausalModel) -> Iterator[list[Tensor]]:
    """Record the final hidden states of the model's sessions, one tensor [B, N, D] per pass."""
    recorded: list[Tensor] = []
    stop = model.decoder.listen(recorded.append)
    try:
        yield recorded
    finally:
        stop()
