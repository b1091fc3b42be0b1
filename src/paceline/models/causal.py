"""Any decoder-only transformers model as a Paceline model: sessions to decode, hidden states to train.

The cache keeps every row right-aligned: the newest token of each row sits in the last column, and
columns to the left of a shorter row are masked. Rolling rows back by different counts moves each
row's keys and values to the right. Distances between tokens of a row then never depend on the other
rows, so rotary, sliding-window and ALiBi models stay right; learned positions are given per row.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from paceline.errors import UnsupportedModelError
from paceline.models.architectures import context_length, prove_rollback, refuse_by_name
from paceline.models.session import ModelSession


class CausalModel:
    """A decoder-only model and its tokenizer.

    Attributes:
        hf: The transformers model.
        tokenizer: Its tokenizer, or None for a wrapped model without one.
        vocab_size: Tokens the tokenizer can name; logit columns beyond are padding and never leave.
        max_length: Longest text, None if the architecture sets no limit.
        eos_token_ids: Tokens that end a text.
        num_parameters: Distinct weights; tied ones count once.
    """

    def __init__(
        self, hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.vocab_size = _named_tokens(tokenizer, self.head_weight.shape[0])
        self.max_length = context_length(hf.config)
        self.eos_token_ids = _eos_token_ids(hf, tokenizer)
        self.num_parameters = sum(weight.numel() for weight in hf.parameters())

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def head_weight(self) -> Tensor:
        """Output projection, [V, D], padding rows included."""
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self._head, "bias", None)

    @property
    def _head(self) -> nn.Linear:
        head: Any = self.hf.get_output_embeddings()
        return head

    def body(self, tokens_BT: Tensor, attention_mask_BT: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D]; pad on the right. Differentiable."""
        return self.hf.base_model(
            input_ids=tokens_BT, attention_mask=attention_mask_BT, use_cache=False
        ).last_hidden_state

    def start_session(self) -> "CausalSession":
        return CausalSession(self)


class CausalSession(ModelSession):
    """Keys and values of a batch of texts, right-aligned."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self.cache = Cache(layer_class_to_replicate=RoomyLayer)

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        lengths_B = torch.tensor([len(row) for row in tokens])
        width = int(lengths_B.max())
        tokens_BW = torch.zeros(len(tokens), width, dtype=torch.int64)
        for row, new in enumerate(tokens):
            tokens_BW[row, width - len(new) :] = torch.tensor(new)
        return self._forward(tokens_BW, lengths_B - width, keep=1)[:, 0]

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        return self._forward(tokens_BN, self.lengths, keep=0)

    def _forward(self, tokens_BN: Tensor, first_position_B: Tensor, *, keep: int) -> Tensor:
        """Logits of the last `keep` columns (0: all). Negative positions are padding."""
        device = self.model.device
        inputs: dict[str, Any] = {"input_ids": tokens_BN.to(device)}
        end_B = first_position_B + tokens_BN.shape[1]
        if bool((end_B != end_B[0]).any()):
            inputs |= _mask_and_positions(end_B, tokens_BN.shape[1], device)
        with torch.inference_mode(), _evaluating(self.model.hf):
            logits = self.model.hf(
                **inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=keep
            ).logits
        return logits[..., : self.vocab_size].float()

    @torch.inference_mode()
    def _rollback(self, counts_B: Tensor) -> None:
        if bool((counts_B == counts_B[0]).all()):
            for layer in self.cache.layers:
                layer.crop(-int(counts_B[0]))
        else:
            self._realign(torch.arange(len(counts_B)), counts_B)

    @torch.inference_mode()
    def _keep_rows(self, rows: Tensor) -> None:
        self._realign(rows, torch.zeros_like(rows))

    def _realign(self, rows: Tensor, counts: Tensor) -> None:
        """Keep these rows, each without its last counts[i] tokens, right-aligned anew."""
        old_width = int(self.lengths.max())
        kept = self.lengths[rows] - counts
        width = int(kept.max())
        columns = old_width - counts[:, None] - width + torch.arange(width)
        # a short row's masked columns may point before its first token: any finite value will do
        flat = (rows[:, None] * old_width + columns.clamp(min=0)).flatten().to(self.model.device)
        for layer in self.cache.layers:
            layer.select(flat, len(rows))  # pyright: ignore[reportAttributeAccessIssue]


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer with room to grow, so that a new token does not copy the past.

    Stored as [B, W, heads, D]: appending and realigning move whole contiguous rows.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms = [_room(new, 0) for new in (key_states, value_states)]
            self.width = 0
        end = self.width + key_states.shape[2]
        for index, new in enumerate((key_states, value_states)):
            if end > self.rooms[index].shape[1]:
                room = _room(new, end)
                room[:, : self.width] = self.rooms[index][:, : self.width]
                self.rooms[index] = room
            self.rooms[index][:, self.width : end] = new.transpose(1, 2)
        self._show(end)
        return self.keys, self.values  # pyright: ignore[reportReturnType]

    def crop(self, tokens_to_remove: int) -> None:
        self._show(self.width - abs(tokens_to_remove))

    def select(self, flat: Tensor, batch: int) -> None:
        """Replace the contents by these (row * width + column) entries, reshaped to `batch` rows."""
        rooms = []
        for room in self.rooms:
            entries = room[:, : self.width].flatten(0, 1).index_select(0, flat)
            rooms.append(entries.view(batch, -1, *room.shape[2:]))
        self.rooms = rooms
        self._show(len(flat) // batch)

    def _show(self, width: int) -> None:
        self.width = width
        self.keys, self.values = (room[:, :width].transpose(1, 2) for room in self.rooms)


def _room(new: Tensor, width: int) -> Tensor:
    """Space for width columns and half as many again."""
    batch, heads, _, size = new.shape
    return new.new_empty(batch, width + width // 2 + 32, heads, size)


def _mask_and_positions(end_B: Tensor, count: int, device: torch.device) -> dict[str, Tensor]:
    """What a batch with holes needs: which columns hold a token, and each new token's position."""
    width = int(end_B.max())
    columns_W = torch.arange(width)
    mask_BW = columns_W >= (width - end_B)[:, None]
    positions_BN = (end_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }


class _evaluating:  # noqa: N801 - reads as a verb
    """Dropout off while a session reads, whatever the training loop has set."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.training = hf.training

    def __enter__(self) -> None:
        if self.training:
            self.hf.eval()

    def __exit__(self, *_: object) -> None:
        if self.training:
            self.hf.train()


def wrap_model(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> CausalModel:
    """A transformers model that you already hold, as a Paceline model.

    Raises:
        UnsupportedModelError: The architecture cannot roll back.
    """
    refuse_by_name(hf.config)
    if not isinstance(hf.get_output_embeddings(), nn.Module):
        raise UnsupportedModelError(
            f"{type(hf).__name__} has no output head; load it with AutoModelForCausalLM"
        )
    model = CausalModel(hf, tokenizer)
    prove_rollback(model)
    return model


def _named_tokens(tokenizer: PreTrainedTokenizerBase | None, width: int) -> int:
    if tokenizer is None:
        return width
    return min(width, max(tokenizer.get_vocab().values()) + 1)


def _eos_token_ids(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """From the generation settings, else the config, else the tokenizer."""
    text_config = hf.config.get_text_config(decoder=True)
    for source in (hf.generation_config, hf.config, text_config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()
