"""The engines by name.

To add one, write its class in a module of its own, and add it here. Its tests are in
tests/unit/measure/test_served.py, with its answers in tests/support/engines.py. Other modules name
an engine only where it alone has something, such as the plugin of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from paceline.engines.assisted import Transformers
from paceline.engines.llamacpp import LlamaServer
from paceline.engines.sglang import SglangServer
from paceline.engines.vllm import VllmServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.engines.contract import Engine
    from paceline.engines.servers import Server

SERVERS: tuple[type[Server], ...] = (VllmServer, SglangServer, LlamaServer)
_KINDS: tuple[type[Engine], ...] = (*SERVERS, Transformers)
KINDS: Mapping[str, type[Engine]] = {kind.name: kind for kind in _KINDS}

if TYPE_CHECKING:
    EngineName: TypeAlias = str
    RuleServer: TypeAlias = str
else:
    EngineName = Literal[tuple(KINDS)]
    """A field of a configuration: an engine."""
    RuleServer = Literal[("paceline", *(kind.name for kind in _KINDS if kind.runs_rules))]
    """A field of a configuration: Paceline's decoder, or an engine that runs its rules."""


def names_of(has: Callable[[type[Engine]], bool]) -> str:
    """The engines for which this is true, such as `vllm, sglang or llamacpp`."""
    *others, last = (kind.name for kind in _KINDS if has(kind))
    return " or ".join([", ".join(others), last] if others else [last])
