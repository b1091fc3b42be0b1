"""transformers and the hub without their bars and reports."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars and no reports meanwhile: what is wrong is raised, the rest is noise."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
