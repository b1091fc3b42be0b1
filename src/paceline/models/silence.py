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
    with _ONE_THREAD, contextlib.ExitStack() as restored:
        if transformers_logging.is_progress_bar_enabled():
            restored.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        for logger in map(logging.getLogger, ("huggingface_hub", "transformers")):
            if logger.level != logging.CRITICAL:  # to set a level takes 0.3 ms
                restored.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)
        yield
