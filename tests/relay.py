"""A server in a process of its own whose answers come from a server in the process of the test.

Paceline starts, watches and ends such a process as an engine's. It needs the standard library
alone: imports of torch and the models would take longer than the tests.
"""

import http.client
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


def relay(url: str, port: int, before: Callable[[str], object] = lambda _: None) -> None:
    """Pass requests to this port on to `url`, until the process ends.

    `before`: is called with the path of each request.
    """
    place = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass_on(self, body: bytes | None) -> None:
            before(self.path)
            status, data = ask(place, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def ask(place: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """The status and content of an answer; `place` is a host with its port."""
    connection = http.client.HTTPConnection(place)
    connection.request("GET" if body is None else "POST", path, body)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found
