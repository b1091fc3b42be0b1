"""Engine versions that Paceline was tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engines.contract import Engine

_TESTED = {
    "vllm": ("0.32",),
    "transformers": ("5.23",),
    # reported by a build from the sources of llama-cpp-python 0.3.36
    "llamacpp": ("b0-unknown",),
    "sglang": (),
}
_WORDS = {
    "vllm": "0.32.0",
    "transformers": "5.23.0",
    "llamacpp": "the one in llama-cpp-python 0.3.36",
}


def untested(engine: Engine) -> str | None:
    """Return a note if Paceline was not tested with the engine's version, else None."""
    version = engine.version or "of an unknown version"
    if engine.version.startswith(_TESTED[engine.name]):
        return None
    tested = _WORDS.get(engine.name, "its response format only")
    return (
        f"{engine.name} {version} was not tested with Paceline (tested: {tested}); if the results "
        "differ, its counters may have another meaning"
    )
