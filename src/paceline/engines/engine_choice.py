"""Configuration of an engine, and the command that starts its server."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import Field, ValidationInfo, model_validator

from paceline.config import StrictModel
from paceline.engines.client import Client, KeyVariable, api_key, check_packages, root_of
from paceline.engines.commands import (
    PROGRAMS,
    RULE_VARIABLE,
    Drafting,
    EngineName,
    Room,
    draft_arguments,
    dtype_arguments,
    room_arguments,
    target_arguments,
)
from paceline.engines.llamacpp import LlamaServer
from paceline.engines.process import find_program
from paceline.engines.sglang import SglangServer
from paceline.engines.vllm import VllmServer
from paceline.errors import UsageError
from paceline.permissions import PROGRAMS as ALLOWED
from paceline.permissions import Origin, allowed, is_given

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.engines.contract import Engine


_GPUS = "CUDA_VISIBLE_DEVICES"


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
    api_key_env: KeyVariable = None
    program: str | None = None
    options: tuple[str, ...] = ()
    target: str | None = None
    draft: str | None = None
    start_seconds: float = Field(default=900.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _starts_what_the_user_permits(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context is not Origin.CONFIGURATION or not isinstance(values, dict):
            return values
        known = cast("dict[str, Any]", values)
        program = (
            known.get("program") or PROGRAMS.get(cast("Any", str(known.get("engine"))), ("",))[0]
        )
        of_file = [key for key in ("program", "options") if not is_given(known.get(key))]
        if of_file and program not in allowed(ALLOWED):
            raise ValueError(
                f"a file may not set the {of_file[0]} of an engine by itself "
                f"({known[of_file[0]]}); if you trust it, add --allow-program "
                f"{shlex.quote(str(program))}"
            )
        return known

    @model_validator(mode="after")
    def _one_way(self) -> EngineChoice:
        if self.url is not None:
            root_of(self.url)
        if self.url is not None and (self.program or self.options):
            raise ValueError("url names a running server; leave program and options out")
        if self.engine == "transformers" and self.url is not None:
            raise ValueError("transformers runs in this process and has no url")
        if any(option.replace("_", "-").startswith("--api-key") for option in self.options):
            raise ValueError(
                "engine.options is recorded with the result, so it may not hold an API key; a "
                "server that Paceline starts needs none"
            )
        return self


def connect(choice: EngineChoice, client: Client) -> Engine:
    """Connect to a running server; raises EngineError if it does not answer like this engine."""
    match choice.engine:
        case "vllm":
            return VllmServer(client, choice.model)
        case "sglang":
            return SglangServer(client)
        case "llamacpp":
            return LlamaServer(client)
        case "transformers":
            raise UsageError("transformers is not a server")


def client_of(choice: EngineChoice) -> Client:
    """Return a client for `choice.url`; raises UsageError if the API key's variable is not set."""
    assert choice.url is not None, "only for running servers"
    return Client(choice.url, api_key(choice.api_key_env, [choice.url]))


def check_choice(choice: EngineChoice) -> None:
    """Raise UsageError for an invalid URL, key or option, or a missing package or program."""
    if choice.engine == "transformers":
        return
    if choice.url is not None:
        root_of(choice.url)
        api_key(choice.api_key_env, [choice.url])
    check_packages()
    if choice.url is None:
        find_program(choice.program or PROGRAMS[choice.engine][0])


class Setup(NamedTuple):
    """Launch configuration of a server.

    Attributes:
        target: Path or hub name of the target.
        drafting: Speculative decoding; None: off.
        room: Capacity.
        dtype: Compute dtype; auto: the server's default.
        gpu: The only visible GPU that the server uses; None: all.
    """

    target: str
    drafting: Drafting | None
    room: Room
    dtype: str = "auto"
    gpu: int | None = None


def server_command(choice: EngineChoice, setup: Setup, port: int) -> list[str]:
    """Return the command that starts the server on 127.0.0.1."""
    engine = choice.engine
    assert engine != "transformers", "not a server"
    program, *first = PROGRAMS[engine]
    command = [choice.program or program, *first, *target_arguments(engine, setup.target)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += room_arguments(engine, setup.room)
    command += dtype_arguments(engine, setup.dtype)
    if setup.drafting is not None:
        command += draft_arguments(engine, setup.drafting)
    return [*command, *choice.options]


def server_environment(choice: EngineChoice, setup: Setup) -> Mapping[str, str]:
    """Return the environment variables to set for the server."""
    found = {"HF_HUB_OFFLINE": "1"} if os.environ.get("HF_HUB_OFFLINE") else {}
    if setup.gpu is not None:
        visible = os.environ.get(_GPUS)
        found[_GPUS] = visible.split(",")[setup.gpu] if visible else str(setup.gpu)
    if choice.engine != "vllm":
        return found
    rule = None if setup.drafting is None else setup.drafting.rule
    if rule:
        found["VLLM_LOGGING_LEVEL"] = "INFO"  # `running` looks for the plugin's line
    return {**found, "VLLM_NO_USAGE_STATS": "1", RULE_VARIABLE: rule or ""}
