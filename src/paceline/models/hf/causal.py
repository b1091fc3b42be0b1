"""Decoder-only transformers models: forward pass, sessions, hidden states for training.

During a pass, cache rows are right-aligned: each row's newest token is in the last column, and the
columns left of shorter rows are masked. After a ragged rollback, rows are shifted to the right. So
distances between tokens of a row do not depend on other rows, as rotary, sliding-window and ALiBi
models need; learned positions are passed per row.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from paceline.core.sampling import limited
from paceline.errors import UnsupportedModelError
from paceline.models.contract import ModelSession, pad
from paceline.models.hf.architectures import body_of, decoder_body, is_encoder_decoder
from paceline.models.hf.base import HfModel, evaluating
from paceline.models.hf.cache import (
    RoomyCache,
    at_positions,
    cache_argument,
    mask_and_positions,
    takes_positions,
)
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.row_session import RecurrentRow, RowSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.hf.base import Sessions, StartSession


class HfDecoder:
    """The forward pass of transformers."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        self.hf = hf
        self.draft_vocabulary = draft_vocabulary
        # those of an encoder-decoder are positions of sources
        self._takes_positions = not is_encoder_decoder(hf.config) and takes_positions(hf)
        self._cache_argument = cache_argument(hf)
        self._num_listeners = 0

    def __call__(self, tokens_BN: Tensor, cache: Any, ends_B: Tensor | None, keep: int) -> Tensor:
        # without padding, most models are faster without mask and positions
        ragged = {} if ends_B is None else mask_and_positions(ends_B, tokens_BN)
        placed = contextlib.nullcontext()
        if ragged and not self._takes_positions:
            decoder: Any = self.hf.get_decoder()
            placed = at_positions(decoder, ragged.pop("position_ids"))
        inputs = self._inputs(tokens_BN, cache, keep, **ragged)
        with placed:
            logits = self.hf(**inputs, **{self._cache_argument: cache}, use_cache=True).logits
        logits = logits[:, -keep:]
        return logits if self.draft_vocabulary is None else limited(logits, self.draft_vocabulary)

    def _inputs(self, tokens_BN: Tensor, cache: Any, keep: int, **ragged: Tensor) -> dict[str, Any]:
        """Arguments beside the cache; `ragged`: those of `mask_and_positions`, if rows differ."""
        kept, config = cast("Any", keep), self.hf.config.get_text_config(decoder=True)
        if keep and self._num_listeners and getattr(config, "num_kv_shared_layers", 0):
            # by a number, Gemma 4 cuts the hidden states, too
            kept = torch.arange(tokens_BN.shape[1])[-keep:].to(tokens_BN.device)
        return {"input_ids": tokens_BN, "logits_to_keep": kept, **ragged}

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        logit_map(self.hf)  # measures it now: it runs a pass of its own

        def hear(_module: Any, _inputs: Any, output: Any) -> None:
            listener(for_head(output.last_hidden_state, self.hf))

        hook = decoder_body(self.hf).register_forward_hook(hear)
        self._num_listeners += 1

        def remove() -> None:
            self._num_listeners -= 1
            hook.remove()

        return remove


class CausalSession(ModelSession):
    """A session with a `RoomyCache`."""

    def __init__(self, model: HfModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self.cache = RoomyCache()
        self._device = model.device  # cached, because transformers iterates over weights to find it

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(row) for row in tokens]
        return self._read(pad(tokens, "left").tokens_BT, lengths, keep=1)[:, 0]

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        count = tokens_BN.shape[1]
        return self._read(tokens_BN, [length + count for length in self.lengths], keep=0)

    def _read(self, tokens_BN: Tensor, ends: Sequence[int], *, keep: int) -> Tensor:
        """Logits of the last `keep` columns (0: all); ends[b] is the new length of row b."""
        if self.cache.ends is not None:
            self.cache.realign(range(len(self.lengths)), self.cache.ends, max(self.lengths))
        tokens_BN = tokens_BN.to(self._device)
        with torch.inference_mode(), evaluating(self.model.hf):
            ends_B = None if min(ends) == max(ends) else torch.tensor(ends)
            logits_BNV = self.model.decoder(tokens_BN, self.pass_cache, ends_B, keep).float()
            if self.model.banned_K is not None:
                logits_BNV[..., self.model.banned_K] = -torch.inf
            return logits_BNV

    @property
    def pass_cache(self) -> Any:
        return self.cache

    def _rollback(self, counts: Sequence[int]) -> None:
        ends = self.cache.ends_of(len(counts))
        self.cache.end_at([end - count for end, count in zip(ends, counts, strict=True)])

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = self._fresh()
        logits_RV = fresh._prefill(prompts)
        self.cache.adopt(rows, fresh.cache, len(self.lengths))
        return logits_RV

    def _fresh(self) -> CausalSession:
        return CausalSession(self.model)

    def _keep_rows(self, rows: Sequence[int]) -> None:
        ends = self.cache.ends_of(len(self.lengths))
        longest = max(self.lengths[row] for row in rows)
        self.cache.realign(rows, [ends[row] for row in rows], longest)


class CausalModel(HfModel):
    """A decoder-only model and its tokenizer."""

    plain_pass = HfDecoder
    session_kinds: ClassVar[dict[Sessions, StartSession]] = {
        "batch": CausalSession,
        "rows": functools.partial(RowSession, start=CausalSession),
        "recurrent": functools.partial(RowSession, start=RecurrentRow),
        "stateful": functools.partial(
            RowSession, start=functools.partial(RecurrentRow, one_by_one=True)
        ),
    }

    def hidden(self, batch: Batch) -> Tensor:
        hidden_BTD = body_of(self.hf)(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_BT, use_cache=False
        ).last_hidden_state
        return for_head(hidden_BTD, self.hf)

    def hidden_under(self, tokens_BW: Tensor, sees_BWW: Tensor, positions_BW: Tensor) -> Tensor:
        """`hidden` where each column sees the columns of its row of `sees_BWW`, at positions."""
        lowest = torch.finfo(self.dtype).min
        mask_BWW = torch.zeros_like(sees_BWW, dtype=self.dtype).masked_fill(~sees_BWW, lowest)
        hidden_BWD = body_of(self.hf)(
            input_ids=tokens_BW,
            attention_mask=mask_BWW[:, None],
            position_ids=positions_BW,
            use_cache=False,
        ).last_hidden_state
        return for_head(hidden_BWD, self.hf)

    def plain_logits(self, batch: Batch) -> Tensor:
        return self.hf(
            input_ids=batch.tokens_BT, attention_mask=batch.attention_BT, use_cache=False
        ).logits


@torch.inference_mode()
def last_norm(model: HfModel) -> nn.Module:
    """What a model applies to its hidden states before the head; it may have no layers.

    Raises:
        UnsupportedModelError: it is not found.
    """
    body, outputs = body_of(model.hf), list[tuple[nn.Module, Tensor]]()

    def keep(part: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((part, output))

    with contextlib.ExitStack() as listening:
        for part in body.modules():
            listening.callback(part.register_forward_hook(keep).remove)
        tokens_1T = torch.tensor([[3, 4, 5]], device=model.device)
        last = body(input_ids=tokens_1T, use_cache=False).last_hidden_state
    for part, output in reversed(outputs):
        if output.data_ptr() == last.data_ptr():
            return part
    raise UnsupportedModelError(
        f"the last norm of {model.hf.config.model_type} is not found, so hidden states of a server "
        "cannot be read; record top_logprobs instead"
    )


def for_head(hidden: Tensor, hf: Any) -> Tensor:
    """Hidden states scaled for the head, on its device.

    They get its type if it has 16 bits: those of Mamba have 32.
    """
    weight = hf.get_output_embeddings().weight
    smaller = weight.dtype.itemsize < hidden.dtype.itemsize
    return logit_map(hf).scaled(hidden.to(weight.device, weight.dtype if smaller else None))
