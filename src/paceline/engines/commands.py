"""Configuration of an engine, and the command that starts its server."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, ValidationInfo, model_validator

from paceline.config import StrictModel
from paceline.engines.client import root_of
from paceline.engines.kinds import KINDS, EngineName
from paceline.engines.servers import Server
from paceline.errors import UsageError
from paceline.permissions import PROGRAMS, Origin, allowed

if TYPE_CHECKING:
    from paceline.engines.contract import Engine, Setup


class EngineChoice(StrictModel):
    """An engine: the URL of a running server, or how to start one.

    Attributes:
        engine: The engine.
        url: URL of a running server; None: start one.
        model: Name of the model, if the server serves several.
        api_key_env: Environment variable that holds the server's API key.
        program: Program to start: vllm, llama-server, or the python of SGLang; None: from the PATH.
        options: More arguments of the server.
        target: Directory or GGUF file that the engine loads as target; None: the target itself.
        draft: Directory or GGUF file that the engine loads as draft; None: the draft itself.
        start_seconds: Timeout for starting the server.
    """

    engine: EngineName
    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    program: str | None = None
    options: tuple[str, ...] = ()
    target: str | None = None
    draft: str | None = None
    start_seconds: float = Field(default=900.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _starts_what_the_user_permits(cls, values: Any, info: ValidationInfo) -> Any:
        values = {"engine": values} if isinstance(values, str) else values
        if isinstance(values, dict):
            known = cast("dict[str, Any]", values)
            for key in ("program", "options"):
                if known.get(key) is not None:
                    check_permitted(known, key, known[key], info)
        return values

    @model_validator(mode="after")
    def _one_way(self) -> EngineChoice:
        if self.url is not None:
            root_of(self.url)
        if self.url is not None and (self.program or self.options):
            raise ValueError("url names a running server; leave program and options out")
        if self.kind.in_process and self.url is not None:
            raise ValueError(f"{self.engine} runs in this process and has no url")
        return self

    @property
    def kind(self) -> type[Engine]:
        return KINDS[self.engine]

    @property
    def server(self) -> type[Server]:
        """The engine's class; raises UsageError for transformers, which is not a server."""
        if not issubclass(self.kind, Server):
            raise UsageError(f"{self.engine} is not a server")
        return self.kind


def check_permitted(choice: Any, key: str, value: Any, info: ValidationInfo) -> None:
    """Raise a ValueError if a file sets this key of an engine whose program was not allowed."""
    if info.context is not Origin.CONFIGURATION:
        return
    known: dict[str, Any] = choice if isinstance(choice, dict) else {"engine": choice}
    kind = KINDS.get(str(known.get("engine")))
    program = known.get("program") or ""
    if not program and kind is not None and issubclass(kind, Server):
        program = kind.program[0]
    if program not in allowed(PROGRAMS):
        raise ValueError(
            f"a file may not set the {key} of an engine by itself ({value}); if you trust it, add "
            f"--allow-program {shlex.quote(str(program))}"
        )


def server_command(choice: EngineChoice, setup: Setup, port: int) -> list[str]:
    """Return the command that starts the server on 127.0.0.1."""
    program, *first = choice.server.program
    arguments = choice.server.arguments(setup, port)
    return [choice.program or program, *first, *arguments, *choice.options]
