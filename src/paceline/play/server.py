"""Serves the page on this machine, and decodes what it asks for: texts in turn, block by block.

Other web pages must not use the models: a request has to name this machine as its host (DNS
rebinding) and, if it posts, this page as its origin.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler
from importlib import resources
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import TYPE_CHECKING, Any

from paceline.config import validate
from paceline.errors import PacelineError, UsageError, first_line
from paceline.play.runs import PlayRequest, decoded, rules

if TYPE_CHECKING:
    from paceline.models import HfModel

_LARGEST = 1 << 20  # bytes of a request
_FILES = {
    "/": ("text/html", ("play/static/index.html",)),
    "/play.css": ("text/css", ("view/templates/style.css", "play/static/play.css")),
    "/play.js": ("text/javascript", ("play/static/play.js",)),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Playground(ThreadingTCPServer):
    """Listens at `address`, on this machine only; raises UsageError if the port cannot be used."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen at port {port} ({error.strerror}); choose another by --port, or "
                "--port 0 for a free one"
            ) from None
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        self.models = Lock()  # whoever holds it may use them

    def serve(self, target: HfModel, draft: HfModel, names: str) -> None:
        """Answer until `shutdown` or an interrupt, after which a text ends with its block."""
        self.pair = target, draft
        self.settings = {"models": names, "rules": rules()}
        try:
            self.serve_forever()
        finally:
            self.server_close()
            self.models.acquire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a bug; a browser that has left is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Playground  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 60  # seconds that a browser may keep its thread waiting

    def parse_request(self) -> bool:
        """As the base class, and False after refusing a request that may not use the models."""
        if not super().parse_request():
            return False
        asked, posts = self.headers, self.command == "POST"
        host, origin = asked["host"] or "", asked["origin"]
        if re.sub(r":\d+$", "", host) not in ("localhost", "127.0.0.1"):
            self._refuse(403, "this host is not served; open the address that play printed")
        elif posts and origin is not None and origin != f"http://{host}":
            self._refuse(403, "another page sent this request; use the page of play itself")
        elif posts and asked["content-type"] != "application/json":
            self._refuse(415, "the request must be application/json")
        else:
            return True
        return False

    def do_GET(self) -> None:
        if self.path == "/settings":
            self._answer(200, "application/json", json.dumps(self.server.settings))
        elif self.path in _FILES:
            kind, names = _FILES[self.path]
            files = [resources.files("paceline").joinpath(name) for name in names]
            self._answer(200, kind, "".join(file.read_text("utf-8") for file in files))
        else:
            self._refuse(404, "there is no such page; open the address that play printed")

    def do_POST(self) -> None:
        try:
            length = min(abs(int(self.headers["content-length"] or 0)), _LARGEST)
            request = validate(PlayRequest, json.loads(self.rfile.read(length)))
        except (ValueError, RecursionError) as error:
            self._refuse(422, first_line(error))
            return
        self._answer(200, "application/x-ndjson", "")
        events, event = decoded(*self.server.pair, request), {"tokens": None}
        try:
            while "tokens" in event:  # or until the browser has left: then nothing can be written
                try:
                    with self.server.models:
                        event = next(events, {"end": True})
                except PacelineError as error:
                    event = {"error": str(error)}
                except Exception as error:
                    said = f"{type(error).__name__}: {first_line(error)}"
                    event = {"error": f"the model failed: {said}"}
                self.wfile.write(json.dumps(event, allow_nan=False).encode() + b"\n")
        finally:
            with self.server.models:  # its sessions end before another request begins
                events.close()

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, "application/json", json.dumps({"error": message}))

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal shows the address alone."""
