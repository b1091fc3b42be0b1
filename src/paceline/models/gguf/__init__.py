"""Reads GGUF files: converts each to a model directory in the cache, once."""

from paceline.models.gguf.conversion import (
    convert_gguf,
    converted_gguf,
    is_converted,
    is_gguf,
    open_gguf,
    read_gguf_header,
)

__all__ = [
    "convert_gguf",
    "converted_gguf",
    "is_converted",
    "is_gguf",
    "open_gguf",
    "read_gguf_header",
]
