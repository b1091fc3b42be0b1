"""A page in the browser on which a pair decodes, and traces of texts are read.

runs.py     what a request asks for, and what decoding it reports
server.py   the page and its requests by Starlette; who may send them
static/     the page; rules.js has the rules on the rows of a trace

Starlette and Uvicorn, of the extra `play`, parse requests and notice that a browser has left; both
are small, and all that they need is in `dev` already. Call `require` before importing `server`.
"""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import UsageError

_LIBRARIES = ("starlette", "uvicorn")


def require() -> None:
    """Check that the page can be served; raises UsageError if a library is not installed."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"play needs {' and '.join(missing)}; install with: pip install -e '.[play]'"
        )
