"""Talking to a server over HTTP; whatever goes wrong is one line."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    import openai

_SECONDS = 600.0
_SHOWN = 160  # characters of a server's own words in an error


class Client:
    """A server at a URL.

    Attributes:
        url: Its root, without /v1.
    """

    def __init__(self, url: str, api_key: str | None = None, *, seconds: float = _SECONDS) -> None:
        if importlib.util.find_spec("openai") is None:
            raise UsageError("talking to a server needs: pip install 'paceline[engines]'")
        import openai

        self.url = root_of(url)
        self._openai = openai.OpenAI(
            base_url=self.url, api_key=api_key or "none", timeout=seconds, max_retries=3
        )

    def get_text(self, path: str) -> str:
        """A page, as it is.

        Raises:
            EngineError: The server did not give it.
        """
        return self._ask(path, lambda: self._openai.get(path, cast_to=str))

    def get(self, path: str) -> dict[str, Any]:
        """A page of JSON.

        Raises:
            EngineError: The server did not give it.
        """
        return _mapping(self.get_text(path), f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            EngineError: There is none, or it is no JSON.
        """
        text = self._ask(path, lambda: self._openai.post(path, body=body, cast_to=str))
        return _mapping(text, f"{self.url}{path}")

    def _ask(self, path: str, call: Any) -> str:
        import openai

        try:
            return call()
        except openai.APIStatusError as error:
            raise EngineError(_refusal(f"{self.url}{path}", error)) from error
        except openai.APITimeoutError as error:
            raise EngineError(
                f"{self.url}{path} did not answer in {_SECONDS:.0f} s; the server may be overloaded"
            ) from error
        except openai.APIConnectionError as error:
            raise EngineError(
                f"{self.url}{path} cannot be reached or broke off ({_cause(error)}); is the server "
                "running, and is this its URL?"
            ) from error


def root_of(url: str) -> str:
    """`http://host:port`, whatever of /v1/... stands behind it.

    Raises:
        UsageError: This is no URL.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server; wanted one such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _refusal(where: str, error: openai.APIStatusError) -> str:
    said = " ".join(error.message.split())[:_SHOWN]
    advice = {
        401: "the key is wrong or missing; give its environment variable as --set api_key_env=NAME",
        403: "the key may not do this",
        404: "the server has no such page or model; is it of this engine, and is the model's name right?",
        429: "the server refuses more requests for now; try again later",
    }.get(error.status_code, "look into the server's log" if error.status_code >= 500 else "")
    return f"{where} answered {error.status_code} ({said})" + (f"; {advice}" if advice else "")


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineError(
            f"{where} answered something that is no JSON object ({' '.join(text.split())[:60]!r}); part "
            "of the answer may be lost, or another server is at this URL"
        )
    return found


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:_SHOWN] or type(cause).__name__
