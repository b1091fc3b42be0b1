"""Limits of a server's answer: its size, its time, and no compression; and of what is asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx2

from paceline.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

MOST_BYTES = 64 << 20
UNCOMPRESSED = {"Accept-Encoding": "identity"}  # a few bytes could stand for very many


_ASKED = ("accept", "accept-encoding", "authorization", "connection", "content-length")
_ASKED += ("content-type", "host", "user-agent")


async def drop_other_headers(request: httpx2.Request) -> None:
    """A hook of a client: drop the headers that a library adds from the environment."""
    for name in set(request.headers) - set(_ASKED):
        del request.headers[name]


def limiting(seconds: float) -> Callable[[httpx2.Response], None]:
    """A hook of a client: reading an answer raises EngineError beyond the limits.

    `seconds`: from the end of its headers to its end.
    """

    def limit(answer: httpx2.Response) -> None:
        encoding = answer.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise EngineError(
                f"{answer.url} answered in the encoding {encoding[:20]!r}, which was not asked "
                "for; configure the server, or the proxy before it, not to compress"
            )
        answer.encoding = "utf-8"  # not the codec that the server names
        answer.stream = _Limited(answer.stream, str(answer.url), seconds)

    return limit


def limiting_async(seconds: float) -> Callable[[httpx2.Response], Awaitable[None]]:
    """`limiting` for an asynchronous client."""
    limit = limiting(seconds)

    async def limit_async(answer: httpx2.Response) -> None:
        limit(answer)

    return limit_async


class _Limited(httpx2.SyncByteStream, httpx2.AsyncByteStream):
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
            raise EngineError(
                f"{self._where} did not end its answer in {self._seconds:.0f} s; the server may be "
                "overloaded"
            )

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
