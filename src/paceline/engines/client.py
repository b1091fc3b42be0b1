"""HTTP client for engine servers: API keys, limits of answers, and one-line errors."""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import json
import os
import re
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo

from paceline.errors import EngineError, UsageError
from paceline.permissions import Origin, is_given

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    import httpx2

Shape = TypeVar("Shape", bound=BaseModel)

SECONDS = 600.0
"""Timeout of a request in seconds: until its answer begins, and again until it has ended."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection; a machine that drops packets would hold it for minutes."""
_KEYS: set[str] = set()  # API keys, which no error shows
_SHOWN = 160  # characters of a server's answer in an error message
MOST_BYTES = 64 << 20  # of an answer
UNCOMPRESSED = {"Accept-Encoding": "identity"}  # a few bytes could stand for very many
_ASKED = ("accept", "accept-encoding", "authorization", "connection", "content-length")
_ASKED += ("content-type", "host", "user-agent")
_ENDPOINT = re.compile(r"/v1(/(chat/)?completions|/models)?$")  # of a path
_EVENT = "data: "  # of a stream of server-sent events
_ADVICE = {
    401: "the API key is wrong or missing; name its variable with --set {key_setting}=NAME",
    403: "the API key does not permit this request",
    404: "the server has no such endpoint or model; check the engine and the model name",
    429: "the server refuses more requests for now; try again later",
}


def _named_by_the_user(variable: Any, info: ValidationInfo) -> Any:
    """Refuse a variable that a file names: it would send any secret of the user to its server."""
    if info.context is Origin.CONFIGURATION and not is_given(variable):
        raise ValueError(
            f"a file may not send the key in {shorten(str(variable))}; if you trust the server, "
            "name the variable on the command line with --set"
        )
    return variable


KeyVariable = Annotated[str | None, BeforeValidator(_named_by_the_user)]
"""A setting: the environment variable that holds an API key."""


class UnavailableError(EngineError):
    """The server does not answer, or refuses for now."""


class StatusError(EngineError):
    """The server answered with an HTTP status other than 200, given by `status`."""

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
        seconds: float | None = None,
    ) -> None:
        """Connect to `url`.

        `key_setting`: the setting that names the key's variable. `seconds`: timeout of a request;
        None: `SECONDS`.
        """
        check_packages()
        import httpx2

        self.url = root_of(url)
        if api_key is not None:
            _refuse_plain_http(self.url)
        self._key_setting = key_setting
        self._seconds = SECONDS if seconds is None else seconds
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers | UNCOMPRESSED,
            timeout=timeouts(self._seconds),
            event_hooks={"response": [limiting(self._seconds)]},
            limits=httpx2.Limits(max_connections=None),  # one per concurrent request
            **transport(self.url),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get_text(self, path: str) -> str:
        """Return the body of a GET request, or raise EngineError."""
        return self._ask("GET", path)

    def get(self, path: str, shape: type[Shape]) -> Shape:
        """Return the JSON of a GET request, validated as `shape`, or raise EngineError."""
        return parsed(self._ask("GET", path), shape, f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any], shape: type[Shape]) -> Shape:
        """Return the JSON of a POST request, validated as `shape`, or raise EngineError."""
        return parsed(self._ask("POST", path, body), shape, f"{self.url}{path}")

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
            raise UnavailableError(unreachable(where, error, self._seconds)) from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        import httpx2

        where = f"{self.url}{path}"
        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise UnavailableError(unreachable(where, error, self._seconds)) from error
        if answer.status_code != 200:
            raise self._refusal(where, answer)
        return answer.text

    def _refusal(self, where: str, answer: httpx2.Response) -> StatusError:
        advice = advice_for(answer.status_code, self._key_setting)
        return StatusError(refusal(where, answer, advice), answer.status_code)


def api_key(variable: str | None, urls: Sequence[str]) -> str | None:
    """The API key in an environment variable, to send to these servers.

    Raises:
        UsageError: it is not set or holds no key, or a server of another machine is asked without
            encryption.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # files of Windows leave a carriage return
    if not key:
        raise UsageError(
            f"the environment variable {variable} is not set; set it to the API key of the server"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(
            f"the environment variable {variable} holds spaces or characters beyond ASCII, which "
            "no API key has; set it to the API key of the server alone"
        )
    for url in urls:
        _refuse_plain_http(root_of(url))
    _KEYS.add(key)
    return key


def _refuse_plain_http(url: str) -> None:
    if url.startswith("http://") and not is_loopback(url):
        raise UsageError(
            f"{url} would get the API key without encryption; use https, or leave api_key_env out"
        )


def check_packages() -> None:
    """Raise UsageError if a package of the HTTP client is missing."""
    missing = [n for n in ("httpx2", "prometheus_client") if importlib.util.find_spec(n) is None]
    if missing:
        raise UsageError(
            f"engine servers need {' and '.join(missing)}: pip install -e '.[engines]'"
        )


def root_of(url: str) -> str:
    """Return `http://host:port`, without /v1; raises UsageError if invalid or with a password."""
    # what follows a colon may be a password
    shown = "it" if "@" in url or ":" in url.partition("://")[2 * ("://" in url)] else repr(url)
    wanted = f"{shown} is not the URL of a server; give a URL such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        named = "://" in url or "." in url or "localhost" in url or parts.port is not None
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        valid = valid and named  # a word alone is no URL
    except ValueError:
        raise UsageError(wanted) from None
    if not valid:
        raise UsageError(wanted)
    if parts.username is not None:
        raise UsageError(
            "the URL holds a user name or a password, which results would record; put the API key "
            "into an environment variable and name it with --set engine.api_key_env=NAME"
        )
    path = _ENDPOINT.sub("", parts.path.rstrip("/")).rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


@functools.cache
def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """Trusted certificates, shared by all clients because loading them is slow.

    `trust_env` reads SSL_CERT_FILE and SSL_CERT_DIR.

    Raises:
        EngineError: the certificates cannot be read.
    """
    import httpx2

    try:
        return httpx2.create_ssl_context(trust_env=trust_env)
    except OSError as error:
        where = os.environ.get("SSL_CERT_FILE") or "the system's store"
        raise EngineError(
            f"cannot read trusted certificates from {where} ({error.strerror or error}); "
            "set SSL_CERT_FILE to a file with certificates"
        ) from None


def is_loopback(url: str) -> bool:
    """True if the URL is one of this machine, as is 0.0.0.0, which servers log as their own."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def advice_for(status: int, key_setting: str) -> str:
    """What to do about an HTTP status; empty if there is no advice."""
    advice = _ADVICE.get(status, "check the server log" if status >= 500 else "")
    return advice.format(key_setting=key_setting)


def unreachable(where: str, error: BaseException, seconds: float, advice: str = "") -> str:
    """The message for a request without an answer; `advice`: how to avoid a timeout."""
    import httpx2

    is_connected = not isinstance(error, httpx2.ConnectTimeout)
    if isinstance(error, httpx2.TimeoutException) and is_connected:
        return f"{where} did not answer in {seconds:.0f} s; the server may be overloaded{advice}"
    said = shorten(str(error)) or type(error).__name__
    return (
        f"{where} cannot be reached or closed the connection ({said}); check that the server runs "
        "and that this is its URL"
    )


def refusal(where: str, answer: httpx2.Response, advice: str) -> str:
    """The message for an answer with another status than 200."""
    message = f"{where} answered {answer.status_code} ({shorten(answer.text)})"
    return f"{message}; {advice}" if advice else message


def parsed(text: str, shape: type[Shape], where: str) -> Shape:
    """JSON text, validated as `shape`; raises EngineError."""
    try:
        return shape.model_validate(json.loads(text))
    except ValidationError as error:
        fault = error.errors()[0]
        field = shorten(".".join(map(str, fault["loc"]))) or "JSON"
        raise EngineError(
            f"{where} answered with invalid {field} ({fault['msg']}); this engine or version is "
            "not supported"
        ) from error
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{where} answered with text that is not JSON ({shorten(text)[:60]!r}); the answer "
            "may be truncated, or another server runs at this URL"
        ) from error


def shorten(text: str) -> str:
    """The beginning of what a server says, as one line without API keys."""
    return " ".join(without_keys(text).split())[:_SHOWN]


def without_keys(text: str) -> str:
    """What a server says, without the API keys that were read."""
    for key in _KEYS:
        text = text.replace(key, "***")
    return text


def transport(url: str) -> dict[str, Any]:
    """Certificates and proxies of a connection; no proxy can reach this machine."""
    trust_env = not is_loopback(url)
    return {"verify": certificates(trust_env=trust_env), "trust_env": trust_env}


def timeouts(seconds: float) -> httpx2.Timeout:
    """The timeouts of a client; `seconds`: of a request."""
    import httpx2

    return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))


async def drop_other_headers(request: httpx2.Request) -> None:
    """A hook of a client: drop the headers that a library adds from the environment."""
    for name in set(request.headers) - set(_ASKED):
        del request.headers[name]


def limiting(seconds: float) -> Callable[[httpx2.Response], None]:
    """A hook of a client: reading an answer raises EngineError beyond the limits.

    `seconds`: from the end of its headers to its end; beyond them the error is UnavailableError.
    """

    def limit(answer: httpx2.Response) -> None:
        encoding = answer.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise EngineError(
                f"{answer.url} answered in the encoding {encoding[:20]!r}, which was not asked "
                "for; configure the server, or the proxy before it, not to compress"
            )
        answer.encoding = "utf-8"  # not the codec that the server names
        answer.stream = _limited_stream()(answer.stream, str(answer.url), seconds)

    return limit


@functools.cache
def _limited_stream() -> Any:
    """`_Limited` as a stream of httpx2, which is imported when it is needed."""
    import httpx2

    return type("Limited", (_Limited, httpx2.SyncByteStream, httpx2.AsyncByteStream), {})


class _Limited:
    def __init__(self, stream: Any, where: str, seconds: float) -> None:
        self._stream = stream
        self._where = where
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds
        self._left = MOST_BYTES

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._count(part)
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._count(part)
            yield part

    def _count(self, part: bytes) -> None:
        self._left -= len(part)
        if self._left < 0:
            raise EngineError(
                f"{self._where} answered with more than {MOST_BYTES:,} bytes, which are not read; "
                "check that the URL is that of the engine"
            )
        if time.monotonic() > self._ends_at:
            raise UnavailableError(
                f"{self._where} did not end its answer in {self._seconds:.0f} s; the server may be "
                "overloaded"
            )

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
