"""Autoregressive decoding, the baseline: one target pass per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.sampling import as_list
from paceline.decode.block import draw
from paceline.decode.decoder import BatchSlots, Decoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.decode.text import Block, Text


class AutoregressiveDecoder(Decoder):
    """Samples each token from the target."""

    @torch.inference_mode()
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        session = self._start_session(self.target)
        slots = BatchSlots(texts, batch_size)
        yield from self._begin(slots, session)
        while True:
            yield from self._refill(slots, session)
            if not (live := slots.texts):
                return
            newest = [text.newest(1) for text in live]
            uniforms = None
            if not self.sampling.greedy:
                uniforms = [[text.draw_choice()] for text in live]
            plan = DrawPlan(1, self.sampling)
            drawn = draw(session, DrawRequest(newest, plan, uniforms, self._seen(live)))
            for text, (token,) in zip(live, as_list(drawn.tokens_BG), strict=True):
                yield text, text.add_block([], 0, token)
