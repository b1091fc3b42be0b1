"""A playground of tiny models, served in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.models import HfModel, wrap_model
from paceline.play.server import Playground
from support.models import tiny_hf, tiny_tokenizer


def peaked_pair(**overrides: Any) -> tuple[HfModel, HfModel]:
    """A tiny target whose distributions have peaks, and as its draft the same with noise."""
    tokenizer = tiny_tokenizer()
    noise = torch.Generator().manual_seed(0)
    target, draft = (tiny_hf(vocab_size=len(tokenizer), **overrides) for _ in range(2))
    for model, scale in ((target, 0.0), (draft, 0.25)):
        weight: Any = model.get_output_embeddings().weight
        weight.data = 3 * weight.data + scale * torch.randn(weight.shape, generator=noise)
    return wrap_model(target, tokenizer), wrap_model(draft, tokenizer)


@contextmanager
def served(pair: tuple[HfModel, HfModel]) -> Iterator[str]:
    """The address of the page of a pair at a free port, while the block runs."""
    playground = Playground(0)
    names = "target tiny <b>target</b>, draft tiny draft"
    thread = threading.Thread(target=playground.serve, args=(*pair, names))
    thread.start()
    try:
        yield playground.address
    finally:
        playground.shutdown()
        thread.join()
