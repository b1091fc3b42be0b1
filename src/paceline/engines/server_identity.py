"""What an OpenAI-compatible server is: its model, its program, and its tokenizer."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.engines.client import Client, StatusError, shorten
from paceline.engines.text_errors import KEY_SETTING, UnavailableError, by_status
from paceline.engines.vllm import Models
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    Tokenize = Callable[[str], list[int]]

_PROBE = "def f(x):\n    return 'naïve 東京 ½', 12345  # Hello, world!"
"""Text of which servers and tokenizer must give the same ids."""


class _Version(BaseModel):
    version: str


class _Properties(BaseModel):
    build_info: str


class _Tokens(BaseModel):
    tokens: list[int]


def identify(url: str, key: str | None, wanted: str | None, tokenize: Tokenize) -> tuple[str, str]:
    """The model's name, and the server's name and version.

    Args:
        url: The server's root.
        key: API key; None: the server needs none.
        wanted: Name of the model; None: the only one that the server serves.
        tokenize: Token ids of a text without special tokens, which must be the server's.

    Raises:
        UsageError: It does not serve this model, has another tokenizer, or refuses the key.
        UnavailableError: It does not answer, or refuses for now.
    """
    client = Client(url, key, key_setting=KEY_SETTING)
    try:
        name, tokenizing = _program(client)
        model = _served_model(client, wanted)
        if tokenizing is not None:
            ours = tokenize(_PROBE)
            got = client.post("/tokenize", {"model": model, **tokenizing}, _Tokens).tokens
            if got != ours:
                first = [*map(operator.eq, got, ours), False].index(False)
                raise UsageError(
                    f"{url} has another tokenizer than the prompts: {len(got)} tokens "
                    f"instead of {len(ours)} for the same text, different from token {first} "
                    "on; set target to a directory with the tokenizer of the served model"
                )
    except StatusError as error:
        raise by_status(str(error), error.status) from None
    except UsageError:
        raise
    except EngineError as error:
        raise UnavailableError(str(error)) from None
    finally:
        client.close()
    return model, name


def _program(client: Client) -> tuple[str, dict[str, Any] | None]:
    """Name and version, and the body of a request that tokenizes the probe."""
    try:
        version = client.get("/version", _Version).version
    except EngineError:
        version = None
    if version is not None:
        return f"vllm {version}", {"prompt": _PROBE, "add_special_tokens": False}
    try:
        build = client.get("/props", _Properties).build_info
    except EngineError:
        return "", None
    return f"llama.cpp {build}", {"content": _PROBE, "add_special": False}


def _served_model(client: Client, wanted: str | None) -> str:
    models = [model.id for model in client.get("/v1/models", Models).data]
    shown = shorten(", ".join(models)) or "no model"
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted is None:
        raise UsageError(f"{client.url} serves {shown}; name one model as writer.model")
    if wanted not in models:
        raise UsageError(
            f"{client.url} serves {shown}, not {wanted}; name one that it serves as writer.model"
        )
    return wanted
