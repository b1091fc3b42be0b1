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
    def _blocks(self, texts: Sequence[Text]) -> Iterator[tuple[Text, Block]]:
        session = self.target.start_session()
        logits_BV = session.prefill([text.prompt for text in texts])
        texts = list(texts)
        while texts:
            next_tokens_B = self._next_tokens(logits_BV, texts)
            for text, token in zip(texts, as_list(next_tokens_B), strict=True):
                if text.tokens:
                    yield text, text.add_block([], token, num_drafted=0)
                else:
                    yield text, text.add_first(token)
            live = live_rows(texts)
            if not live:
                return
            if len(live) < len(texts):
                session.keep_rows(live)
                texts = [texts[row] for row in live]
            newest_B1 = torch.tensor([[text.tokens[-1]] for text in texts])
            logits_BV = session.extend(newest_B1)[:, -1]
