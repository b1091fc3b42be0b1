"""Which engine, where it is, and how it is started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.engines.client import Client, check_packages, root_of
from paceline.engines.commands import (
    PROGRAMS,
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.engines.contract import Engine


class EngineChoice(StrictModel):
    """An engine that runs, or that is to be started.

    Attributes:
        engine: Which one.
        url: Of a server that runs; None: it is started here.
        model: The model's name there, if it serves several.
        api_key_env: The environment variable that holds the server's key.
        program: The program that starts it (vllm, llama-server, or the python that has SGLang); None:
            the one on the PATH.
        options: More arguments of the server.
        target: What the engine is given as target: directory or GGUF file. None: the target itself.
        draft: The same of the draft.
        start_seconds: The longest that starting may take.
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

    @model_validator(mode="after")
    def _one_way(self) -> EngineChoice:
        if self.url is not None and (self.program or self.options):
            raise ValueError("url names a server that runs, so program and options start nothing")
        if self.engine == "transformers" and self.url is not None:
            raise ValueError("transformers runs in this process and has no url")
        return self


def connect(choice: EngineChoice, client: Client) -> Engine:
    """The engine behind a server.

    Raises:
        EngineError: The server does not answer as this engine does.
    """
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
    """Of the server at the choice's URL.

    Raises:
        UsageError: The key's variable is not set.
    """
    assert choice.url is not None, "asked only where a server runs"
    key = None
    if choice.api_key_env is not None:
        key = os.environ.get(choice.api_key_env)
        if not key:
            raise UsageError(
                f"the environment variable {choice.api_key_env} is not set; set it to the API key of "
                f"{choice.url}"
            )
    return Client(choice.url, key)


def check_choice(choice: EngineChoice) -> None:
    """Can this engine be reached or started, as far as that can be told at once?

    Raises:
        UsageError: It cannot.
    """
    if choice.engine == "transformers":
        return
    if choice.url is not None:
        root_of(choice.url)
    if any(option.startswith("--api-key") for option in choice.options):
        raise UsageError(
            "engine.options is recorded with the result, so it may not hold an API key; a server that is "
            "started here needs none"
        )
    check_packages()
    if choice.url is None:
        find_program(choice.program or PROGRAMS[choice.engine][0])


class Setup(NamedTuple):
    """What a server is started with.

    Attributes:
        target: What it is given as target.
        drafting: How it drafts; None: it decodes alone.
        room: For which requests.
        dtype: What it computes in; auto: its own choice.
    """

    target: str
    drafting: Drafting | None
    room: Room
    dtype: str = "auto"


def server_command(choice: EngineChoice, setup: Setup, port: int) -> list[str]:
    """How a server is started, on a port of this machine."""
    engine = choice.engine
    assert engine != "transformers", "it is not a server"
    program, *first = PROGRAMS[engine]
    command = [choice.program or program, *first, *target_arguments(engine, setup.target)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += room_arguments(engine, setup.room)
    command += dtype_arguments(engine, setup.dtype)
    if setup.drafting is not None:
        command += draft_arguments(engine, setup.drafting)
    return [*command, *choice.options]


def server_environment(choice: EngineChoice) -> Mapping[str, str]:
    """What its server is to find in its environment."""
    offline = {"HF_HUB_OFFLINE": "1"} if os.environ.get("HF_HUB_OFFLINE") else {}
    return {**offline, "VLLM_NO_USAGE_STATS": "1"} if choice.engine == "vllm" else offline
