"""HTTP client for engine servers: API keys and one-line errors."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from paceline.environment import how_to_install
from paceline.errors import EngineError, UsageError, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import httpx2

Shape = TypeVar("Shape", bound=BaseModel)

SECONDS = 600.0
"""Timeout of a request in seconds: until its answer begins, and between parts of it."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection; a machine that drops packets would hold it for minutes."""
_ENDPOINT = re.compile(r"/v1(/(chat/)?completions|/models)?$")  # of a path
_EVENT = "data: "  # of a stream of server-sent events
_FOR_NOW = (408, 409, 425, 429)  # statuses, as are those from 500 on


class UnavailableError(EngineError):
    """The server does not answer, or refuses for now."""


class StatusError(EngineError):
    """The server refuses the request, with the HTTP status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """HTTP client for one server. It never retries: the server would count the request twice.

    Attributes:
        url: Root of the server, without /v1.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        key_setting: str = "engine.api_key_env",
        seconds: float = SECONDS,
    ) -> None:
        """Connect to `url`.

        `key_setting`: the setting that names the key's variable. `seconds`: timeout of a request.
        """
        check_packages()
        import httpx2

        self.url = root_of(url)
        self._key_setting = key_setting
        self._seconds = seconds
        self._http = httpx2.Client(**connection(self.url, api_key, seconds))

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, shape: type[Shape]) -> Shape:
        """Return the JSON of a GET request, validated as `shape`, or raise EngineError."""
        return parsed(self.ask("GET", path), shape, f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any], shape: type[Shape]) -> Shape:
        """Return the JSON of a POST request, validated as `shape`, or raise EngineError."""
        return parsed(self.ask("POST", path, body), shape, f"{self.url}{path}")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Yield the data of each event that answers a POST request, or raise EngineError."""
        import httpx2

        where = f"{self.url}{path}"
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refusal(where, answer)
                for line in answer.iter_lines():
                    if line.startswith(_EVENT):
                        yield line.removeprefix(_EVENT)
        except httpx2.HTTPError as error:
            raise self._unreachable(where, error) from error

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the body of the answer to a request, or raise EngineError."""
        import httpx2

        where = f"{self.url}{path}"
        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise self._unreachable(where, error) from error
        if answer.status_code != 200:
            raise self._refusal(where, answer)
        return answer.text

    def _unreachable(self, where: str, error: httpx2.HTTPError) -> UnavailableError:
        import httpx2

        if isinstance(error, httpx2.ReadTimeout):
            return UnavailableError(f"{where} did not answer in {self._seconds:.0f} s")
        said = said_by(str(error)) or type(error).__name__
        return UnavailableError(
            f"{where} cannot be reached or closed the connection ({said}); check that the server "
            "runs and that this is its URL"
        )

    def _refusal(self, where: str, answer: httpx2.Response) -> EngineError:
        status = answer.status_code
        message = f"{where} answered {status} ({said_by(answer.text)})"
        if status in _FOR_NOW or (status >= 500 and status != 501):
            return UnavailableError(f"{message}; check the server log")
        if status == 401:
            message += (
                "; the API key is wrong or missing; name its variable with "
                f"--set {self._key_setting}=NAME"
            )
        return StatusError(message, status)


def connection(url: str, api_key: str | None, seconds: float) -> dict[str, Any]:
    """Settings of a client of httpx2; no proxy can reach this machine."""
    import httpx2

    return {
        "base_url": url,
        "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        "timeout": httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
        "limits": httpx2.Limits(max_connections=None),  # one per concurrent request
        "trust_env": not is_loopback(url),
    }


def api_key(variable: str | None, urls: Sequence[str]) -> str | None:
    """The API key in an environment variable, to send to these servers."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(
            f"the environment variable {variable} is not set; set it to the API key of the server"
        )
    for url in map(root_of, urls):
        if url.startswith("http://") and not is_loopback(url):
            raise UsageError(
                f"{url} would get the API key without encryption; use https, or leave api_key_env "
                "out"
            )
    return key


def check_packages() -> None:
    """Raise UsageError if a package of the HTTP client is missing."""
    missing = [n for n in ("httpx2", "prometheus_client") if importlib.util.find_spec(n) is None]
    if missing:
        raise UsageError(
            f"engine servers need {' and '.join(missing)}: {how_to_install('engines')}"
        )


def root_of(url: str) -> str:
    """Return the URL of a server without /v1; raises UsageError if it is no URL of a server."""
    no_url = UsageError(
        f"{url!r} is not the URL of a server; give a URL such as http://127.0.0.1:8000"
    )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise no_url from None
    if not valid:
        raise no_url
    path = _ENDPOINT.sub("", parts.path.rstrip("/")).rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(url: str) -> bool:
    """True if the URL is one of this machine, as is 0.0.0.0, which servers log as their own."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def parsed(
    text: str, shape: type[Shape], where: str, fault: type[EngineError] = EngineError
) -> Shape:
    """JSON text, validated as `shape`; raises `fault`."""
    try:
        return shape.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        field = said_by(".".join(map(str, first["loc"]))) or "JSON"
        raise fault(
            f"{where} answered with invalid {field} ({first['msg']}); this engine or version is "
            "not supported"
        ) from error
    except (ValueError, RecursionError) as error:
        raise fault(
            f"{where} answered with text that is not JSON ({said_by(text)[:60]!r}); the answer "
            "may be truncated, or another server runs at this URL"
        ) from error


def said_by(text: str) -> str:
    """The beginning of what a server says, as one line."""
    return shorten(" ".join(text.split()), 160)
