"""Talking to a server over HTTP; whatever goes wrong is one line."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    import httpx2

    Shape = TypeVar("Shape", bound=BaseModel)

SECONDS = 600.0
"""The longest that an answer may take."""
_SHOWN = 160  # characters of a server's own words in an error
_ADVICE = {
    401: "the API key is wrong or missing; --set engine.api_key_env=NAME names its environment variable",
    403: "the API key does not allow this",
    404: "the server has no such page or model; check the engine and the model's name",
    429: "the server refuses more requests for now; try again later",
}


class StatusError(EngineError):
    """The server refused; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """A server at a URL. A request is sent once: one that is sent again would be counted twice.

    Attributes:
        url: Its root, without /v1.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        check_packages()
        import httpx2

        self.url = root_of(url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers,
            timeout=SECONDS,
            limits=httpx2.Limits(max_connections=None),  # as many as requests at a time
            trust_env=not _is_loopback(self.url),  # a proxy does not reach this machine
        )

    def close(self) -> None:
        """Give its connections back."""
        self._http.close()

    def get_text(self, path: str) -> str:
        """A page, as it is.

        Raises:
            EngineError: The server did not give it.
        """
        return self._ask("GET", path)

    def get(self, path: str, shape: type[Shape]) -> Shape:
        """A page of JSON.

        Raises:
            EngineError: The server did not give it, or it is something else.
        """
        return _parsed(self._ask("GET", path), shape, f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any], shape: type[Shape]) -> Shape:
        """The answer to a request.

        Raises:
            EngineError: There is none, or it is something else.
        """
        return _parsed(self._ask("POST", path, body), shape, f"{self.url}{path}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        import httpx2

        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.TimeoutException as error:
            raise EngineError(
                f"{self.url}{path} did not answer in {SECONDS:.0f} s; the server may be overloaded"
            ) from error
        except httpx2.HTTPError as error:
            raise EngineError(
                f"{self.url}{path} cannot be reached or closed the connection ({_words(str(error))}); "
                "check that the server runs and that this is its URL"
            ) from error
        if answer.status_code != 200:
            raise _refusal(f"{self.url}{path}", answer)
        return answer.text


def check_packages() -> None:
    """Are the packages installed that talking to a server needs?

    Raises:
        UsageError: They are not.
    """
    missing = [n for n in ("httpx2", "prometheus_client") if importlib.util.find_spec(n) is None]
    if missing:
        raise UsageError(
            f"measuring in an engine needs {' and '.join(missing)}: pip install 'paceline[engines]'"
        )


def root_of(url: str) -> str:
    """`http://host:port`, without /v1.

    Raises:
        UsageError: This is not a URL of a server, or it holds a password.
    """
    wanted = f"{url!r} is not the URL of a server; wanted one such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise UsageError(wanted) from None
    if not valid:
        raise UsageError(wanted)
    if parts.username is not None:
        raise UsageError(
            "the URL holds a user name or a password, which results would record; put the API key into "
            "an environment variable and name it by --set engine.api_key_env=NAME"
        )
    path = parts.path.partition("/v1")[0].rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refusal(where: str, answer: httpx2.Response) -> StatusError:
    status = answer.status_code
    advice = _ADVICE.get(status, "check the server log" if status >= 500 else "")
    message = f"{where} answered {status} ({_words(answer.text)})"
    return StatusError(f"{message}; {advice}" if advice else message, status)


def _parsed(text: str, shape: type[Shape], where: str) -> Shape:
    try:
        return shape.model_validate(json.loads(text))
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "the answer"
        raise EngineError(
            f"{where} answered without a usable {place} ({fault['msg']}); this engine or version is not "
            "supported"
        ) from error
    except ValueError as error:
        raise EngineError(
            f"{where} answered something that is not JSON ({_words(text)[:60]!r}); part of the answer may "
            "be lost, or another server is at this URL"
        ) from error


def _words(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
