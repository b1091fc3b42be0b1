"""Servers with cumulative counters: block counts are the difference of two readings."""

from __future__ import annotations

import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.engines.contract import BlockCounts, Engine, Request, Served, Together

if TYPE_CHECKING:
    from collections.abc import Sequence


class CountingServer(Engine):
    """A server with cumulative counters; no other client may use it during a measurement."""

    def serve(self, request: Request) -> Served:
        found = self.serve_together([request], 1)
        return Served(found.tokens[0], found.seconds[0], found.blocks)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Together:
        before = self.counts()
        with ThreadPoolExecutor(batch_size) as pool:
            answers = list(pool.map(self._timed, requests))
        tokens, seconds = [tokens for tokens, _ in answers], [passed for _, passed in answers]
        after = None if before is None else self.settled(before) - before
        return Together(tokens, seconds, after)

    def _timed(self, request: Request) -> tuple[list[int], float]:
        start = time.perf_counter()
        tokens = self.ask(request)
        return tokens, time.perf_counter() - start

    @abstractmethod
    def ask(self, request: Request) -> list[int]:
        """Send a request and read its tokens."""

    @abstractmethod
    def counts(self) -> BlockCounts | None:
        """Block counts since the server started; None if it has no such counters."""

    def settled(self, before: BlockCounts) -> BlockCounts:
        """Return the counters once they include all answers."""
        return self.counts() or before
