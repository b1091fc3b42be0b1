"""Serves the page, and decodes what it asks for: one request at a time.

Models are used in one thread, block by block, while Starlette waits for the browser. Other web
pages must not use the models: a request has to name this server as its host (DNS rebinding) and,
if it posts, as its origin. A server that others can reach wants a token besides.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.config import validate
from paceline.errors import PacelineError, UsageError, first_line
from paceline.play.runs import PlayRequest, Run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from typing import NoReturn

    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.models import HfModel

_LARGEST = 1 << 20  # bytes of a request
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_FILES = {
    "/": ("text/html", ("play/static/index.html",)),
    "/play.css": ("text/css", ("view/templates/style.css", "play/static/play.css")),
    "/play.js": ("text/javascript", ("play/static/play.js",)),
    "/rules.js": ("text/javascript", ("play/static/rules.js",)),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Playground:
    """A pair and its page as an ASGI application, `app`.

    Args:
        settings: What the page shows: names of the models, and the schema of a request.
        hosts: Names of this server in requests; None: any, which needs a token.
        token: What requests to the models must bear; None: nothing.
    """

    def __init__(
        self,
        target: HfModel,
        draft: HfModel,
        settings: dict[str, Any],
        hosts: Collection[str] | None = _LOOPBACK,
        token: str | None = None,
    ) -> None:
        self._pair = target, draft
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, "decode")
        self._run: Run | None = None
        routes = [Route(path, self._file) for path in _FILES]
        routes += [
            Route("/api/settings", self._show_settings),
            Route("/api/decode", self._decode, methods=["POST"]),
            Route("/api/stop", self._stop, methods=["POST"]),
        ]
        self.app = _Guard(Starlette(routes=routes), hosts, token)

    async def _file(self, request: Request) -> Response:
        kind, names = _FILES[request.url.path]
        root = resources.files("paceline")
        text = "".join(root.joinpath(name).read_text("utf-8") for name in names)
        return Response(text, media_type=kind)

    async def _show_settings(self, _request: Request) -> Response:
        return JSONResponse(self._settings)

    async def _stop(self, request: Request) -> Response:
        name = (await _values(request)).get("run")
        found = self._run is not None and self._run.name == name
        if self._run is not None and found:
            self._run.is_stopped = True
        return JSONResponse({"stopped": found})

    async def _decode(self, request: Request) -> Response:
        try:
            wanted = validate(PlayRequest, await _values(request))
            if self._run is not None:
                return _refused(409, "busy: another text is being decoded; try again when it ends")
            self._run = run = Run(*self._pair, wanted)
        except PacelineError as error:
            return _refused(422, str(error))
        return _Streamed(self._events(run), self._release)

    def _release(self) -> None:
        self._run = None

    async def _events(self, run: Run) -> AsyncIterator[str]:
        events = run.events()
        next_event = partial(asyncio.get_running_loop().run_in_executor, self._thread, next)
        try:
            while (event := await next_event(events, None)) is not None:
                yield _sent(event)
        except PacelineError as error:
            yield _sent({"kind": "error", "message": str(error)})
        except Exception as error:
            message = f"the model failed: {type(error).__name__}: {first_line(error)}"
            yield _sent({"kind": "error", "message": message})
        finally:  # also if the browser has left: the thread ends its block, then frees the caches
            self._thread.submit(events.close)


def _sent(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, allow_nan=False)}\n\n"


class _Streamed(StreamingResponse):
    """Server-sent events; calls `release` at the end, even if they were never asked for."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[str], release: Any) -> None:
        super().__init__(content)
        self._release_run = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release_run()


async def _values(request: Request) -> dict[str, Any]:
    """The JSON object of a request; raises UsageError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST:
            raise UsageError(f"the request is larger than {_LARGEST:,} bytes; shorten the prompt")
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError("the request is not a JSON object; send one, as the page does")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


class _Guard:
    """Lets only requests through that may use the models, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, token: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._bearer = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
                message = message | {"headers": [*message["headers"], *more]}
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            return _refused(403, "this host is not served; open the address that play printed")
        if request.method == "POST":
            origin = request.headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != host:
                return _refused(403, "another page sent this request; use the page of play itself")
            if request.headers.get("content-type") != "application/json":
                return _refused(415, "the request must be application/json")
        if self._bearer is not None and request.url.path.startswith("/api/"):
            given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._bearer):
                return _refused(401, "the token is wrong; open the address that play printed")
        return None


def _name_of(host: str) -> str | None:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Listening:
    """A socket that listens, and who may use it.

    Attributes:
        hosts: See `Playground`.
        token: None on a loopback address, else a new random one.
        address: The page, with the token.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            # Python adds the address to the system's words
            reason = str(error.strerror or error).partition(" (")[0]
            raise UsageError(
                f"cannot listen at {host} port {port} ({reason}); choose another by --host and "
                "--port, or --port 0 for a free one"
            ) from None
        found, port = self.socket.getsockname()[:2]
        bound = ipaddress.ip_address(found)
        self.token = None if bound.is_loopback else secrets.token_urlsafe(24)
        self.hosts = None if bound.is_unspecified else {host.lower(), found, *_LOOPBACK}
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{port}/" + (f"#token={self.token}" if self.token else "")

    def server(self, playground: Playground) -> uvicorn.Server:
        """A server; its `run` with this socket ends if it is interrupted."""
        config = uvicorn.Config(
            playground.app,
            log_config=None,  # its own would close the handlers of the whole process
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)
