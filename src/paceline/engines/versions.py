"""The versions of engines that this was tried with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engines.contract import Engine

_TRIED = {
    "vllm": ("0.32",),
    "transformers": ("5.23",),
    # a build from the sources of llama-cpp-python 0.3.36 knows no number
    "llamacpp": ("b0-unknown",),
    "sglang": (),
}
_WORDS = {
    "vllm": "0.32.0",
    "transformers": "5.23.0",
    "llamacpp": "the one in llama-cpp-python 0.3.36",
}


def untried(engine: Engine) -> str | None:
    """A note on a version that nobody tried this with; None: it was tried."""
    version = engine.version or "of an unknown version"
    if engine.version.startswith(_TRIED[engine.name]):
        return None
    tried = _WORDS.get(engine.name)
    was = f"{tried} was" if tried else "only the form of its answers was"
    return (
        f"{engine.name} {version} was not tried with this Paceline, {was}; if the figures differ, its "
        "counters may mean something else"
    )
