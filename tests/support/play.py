"""A playground of tiny models, served in this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.models import HfModel
from paceline.play.runs import controls
from paceline.play.server import Listening, Playground
from support.models import tiny_pair


def peaked_pair(**overrides: Any) -> tuple[HfModel, HfModel]:
    """A tiny pair whose distributions have peaks and do not agree everywhere."""
    pair = tiny_pair(**overrides)
    for model in pair:
        model.hf.get_output_embeddings().weight.data *= 3
    return pair


@contextmanager
def served(pair: tuple[HfModel, HfModel], host: str = "127.0.0.1") -> Iterator[Listening]:
    """The page of a pair at a free port, while the block runs."""
    listening = Listening(host, 0)
    request = controls(lambda kind, name: f"{name} of {kind.__name__}")
    settings = {"target": "tiny <b>target</b>", "draft": "tiny draft", "request": request}
    server = listening.server(Playground(*pair, settings, listening.hosts, listening.token))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.socket]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listening
    finally:
        server.should_exit = True
        thread.join()
