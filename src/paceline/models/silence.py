"""Silences transformers and the hub client, and lets one thread at a time use them."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


_ONE_THREAD = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable progress bars and log messages of transformers and huggingface_hub.

    Other threads wait: these settings, and what transformers replaces in torch while it builds a
    model, are those of the process.
    """
    with _ONE_THREAD, _silence():
        yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    if not bars and levels == [logging.CRITICAL] * len(loggers):  # to set a level takes 0.3 ms
        yield
        return
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
