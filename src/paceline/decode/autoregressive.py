"""The baseline: one target pass a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.lists import as_list
from paceline.core.sampling import SamplingParams
from paceline.decode.decoder import Decoder, live_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.decode.result import Block
    from paceline.decode.text import Text
    from paceline.models.session import Model


class AutoregressiveDecoder(Decoder):
    """Sample each token from the target's own distribution."""

    def __init__(self, target: Model, sampling: SamplingParams | None = None) -> None:
        super().__init__(target, sampling or SamplingParams())

    @torch.inference_mode()
    def blocks(self, texts: Sequence[Text]) -> Iterator[tuple[Text, Block]]:
        session = self._start_session(self.target)
        first_B = self._next_tokens(session.prefill([text.prompt for text in texts]), texts)
        for text, token in zip(texts, as_list(first_B), strict=True):
            yield text, text.add_first(token)
        texts = list(texts)
        while live := live_rows(texts):
            if len(live) < len(texts):
                session.keep_rows(live)
                texts = [texts[row] for row in live]
            newest = [text.newest(1) for text in texts]
            uniforms = None
            if not self.sampling.greedy:
                uniforms = [[text.draw_choice()] for text in texts]
            drawn = session.draw(newest, 1, self.sampling, uniforms, self._seen(texts))
            for text, (token,) in zip(texts, as_list(drawn.tokens_BG), strict=True):
                yield text, text.add_block([], token, num_drafted=0)
