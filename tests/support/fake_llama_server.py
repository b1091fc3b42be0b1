"""A program that takes llama-server's arguments and answers as it does, with tiny models.

Its first argument is the URL of a server of the test, which has the models; what that answers
under /load is where this program's answers come from. `--die-after N`: it ends in the middle of
its N-th answer; `--crash`: while it starts.

Paceline starts, watches and ends such a process as an engine's. It needs the standard library
alone: imports of torch and the models would take longer than the tests.
"""

import argparse
import http.client
import json
import os
import signal
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import urlsplit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models")
    parser.add_argument("-m", required=True)
    parser.add_argument("-md")
    parser.add_argument("-c", type=int)
    parser.add_argument("-np", type=int)
    parser.add_argument("-ctk")
    parser.add_argument("-ctv")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--crash", action="store_true")
    given = parser.parse_args()
    if given.crash:
        os.kill(os.getpid(), signal.SIGSEGV)

    drafts = given.md is not None and given.spec_type == "draft-simple"
    wanted = {
        "target": given.m,
        "draft": given.md if drafts else None,
        "gamma": given.spec_draft_n_max,
    }
    _, loaded = ask(urlsplit(given.models).netloc, "/load", json.dumps(wanted).encode())
    answers = count(1)

    def count_answers(path: str) -> None:
        if path == "/completion" and next(answers) == given.die_after:
            sys.stderr.write("ggml_abort: no memory left\n")
            sys.stderr.flush()
            os._exit(1)

    relay(json.loads(loaded)["url"], given.port, count_answers)


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


if __name__ == "__main__":
    main()
