"""HTTP client for engine servers, with one-line errors."""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import json
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo

from paceline.errors import EngineError, UsageError
from paceline.permissions import Origin, is_given

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

    import httpx2

    Shape = TypeVar("Shape", bound=BaseModel)

SECONDS = 600.0
"""Timeout of a request in seconds: until its answer begins, and again until it has ended."""
_OWN_KEY = re.compile(r"PACELINE_\w+_KEY")
_OPENAI = "https://api.openai.com"
_KEYS: set[str] = set()  # API keys, which no error shows
_SHOWN = 160  # characters of a server's answer in an error message
_EVENT = "data: "  # of a stream of server-sent events
_ADVICE = {
    401: "the API key is wrong or missing; name its variable with --set {key_setting}=NAME",
    403: "the API key does not permit this request",
    404: "the server has no such endpoint or model; check the engine and the model name",
    429: "the server refuses more requests for now; try again later",
}


def _named_by_the_user(variable: Any, info: ValidationInfo) -> Any:
    """Refuse a variable that a file names: it would send any secret of the user to its server."""
    if info.context is not Origin.CONFIGURATION or is_given(variable):
        return variable
    if isinstance(variable, str):
        is_openai = variable == "OPENAI_API_KEY" and _hosts(info.data.get("url")) == {_OPENAI}
        if is_openai or _OWN_KEY.fullmatch(variable):
            return variable
    raise ValueError(
        f"a file may name PACELINE_..._KEY, and OPENAI_API_KEY for {_OPENAI} alone, not "
        f"{shorten(str(variable))}; if you trust the server, name the variable on the command line "
        "with --set"
    )


def _hosts(url: Any) -> set[str]:
    """Roots of one URL or of several, without the path."""
    urls = [url] if isinstance(url, str) else url or ()
    return {"{0.scheme}://{0.netloc}".format(urlsplit(each)) for each in urls}


KeyVariable = Annotated[str | None, BeforeValidator(_named_by_the_user)]
"""A setting: the environment variable that holds an API key."""


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
        self, url: str, api_key: str | None = None, *, key_setting: str = "engine.api_key_env"
    ) -> None:
        """Connect to `url`; `key_setting` is the setting that names the key's variable."""
        check_packages()
        import httpx2

        from paceline.engines.answer_limits import UNCOMPRESSED, limiting

        self.url = root_of(url)
        if api_key is not None:
            _refuse_plain_http(self.url)
        self._key_setting = key_setting
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        trust_env = not is_loopback(self.url)  # a proxy cannot reach this machine
        self._http = httpx2.Client(
            verify=certificates(trust_env=trust_env),
            base_url=self.url,
            headers=headers | UNCOMPRESSED,
            timeout=SECONDS,
            event_hooks={"response": [limiting(SECONDS)]},
            limits=httpx2.Limits(max_connections=None),  # one per concurrent request
            trust_env=trust_env,
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
                    raise _refusal(where, answer, self._key_setting)
                for line in answer.iter_lines():
                    if line.startswith(_EVENT):
                        yield line.removeprefix(_EVENT)
        except httpx2.HTTPError as error:
            raise _unreachable(where, error) from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        import httpx2

        try:
            answer = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise _unreachable(f"{self.url}{path}", error) from error
        if answer.status_code != 200:
            raise _refusal(f"{self.url}{path}", answer, self._key_setting)
        return answer.text


def api_key(variable: str | None, urls: Sequence[str]) -> str | None:
    """The API key in an environment variable, to send to these servers.

    Raises:
        UsageError: it is not set, or a server of another machine is asked without encryption.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageError(
            f"the environment variable {variable} is not set; set it to the API key of the server"
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
    path = parts.path.partition("/v1")[0].rstrip("/")
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
    """True if the URL is one of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advice_for(status: int, key_setting: str) -> str:
    """What to do about an HTTP status; empty if there is no advice."""
    advice = _ADVICE.get(status, "check the server log" if status >= 500 else "")
    return advice.format(key_setting=key_setting)


def _unreachable(where: str, error: httpx2.HTTPError) -> EngineError:
    import httpx2

    if isinstance(error, httpx2.TimeoutException):
        return EngineError(
            f"{where} did not answer in {SECONDS:.0f} s; the server may be overloaded"
        )
    return EngineError(
        f"{where} cannot be reached or closed the connection ({shorten(str(error))}); check that "
        "the server runs and that this is its URL"
    )


def _refusal(where: str, answer: httpx2.Response, key_setting: str) -> StatusError:
    status = answer.status_code
    advice = advice_for(status, key_setting)
    message = f"{where} answered {status} ({shorten(answer.text)})"
    return StatusError(f"{message}; {advice}" if advice else message, status)


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
