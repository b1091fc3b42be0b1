"""The draft that the engine loads, and what the engine counts.

`output/draft` is a link to a directory in `output/served`. A link is replaced in one step, so that
an engine that starts at any moment loads a whole draft.
"""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engines.client import Client
from paceline.engines.servers import block_counts
from paceline.errors import EngineError
from paceline.export import ExportConfig, export
from paceline.records import atomic_write_text, storage_errors

if TYPE_CHECKING:
    from paceline.engines.contract import BlockCounts
    from paceline.follow.config import FollowConfig, Serving

LINK = "draft"
_PREFIXES = ("vllm:", "llamacpp:")  # of counters
_TOLD = ".told"  # the name of the draft that the engine was told of
_RELOAD = {"method": "reload_draft"}


def export_of(config: FollowConfig, name: str, model: str | Path) -> Path:
    """The export of a draft with this name, which is made if it is not there."""
    path = config.output / "served" / name
    if not path.exists():
        gamma = config.judging.num_speculative_tokens
        given = {"to": config.serving.to, "out": path, "num_speculative_tokens": gamma}
        export(ExportConfig(model=str(model), target=config.target, **given))
    return path


def serve(config: FollowConfig, name: str, model: str | Path) -> None:
    """Export a draft, let the link name it, and tell the engine; does nothing once that is done.

    The engine is not told of the first draft, with which it is started.

    Raises:
        EngineError: the engine did not load it. The link names it already.
        StorageError: the link cannot be written.
    """
    link, told = config.output / LINK, config.output / _TOLD
    before = told.read_text("utf-8") if told.exists() else None
    if before == name:
        return
    path = export_of(config, name, model)
    scratch = link.with_name(f".{LINK}.new")
    with storage_errors(link):
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(Path("served") / path.name)
        scratch.replace(link)
    if before is not None:
        _tell(config.serving, link)
    atomic_write_text(told, name)


def _tell(serving: Serving, link: Path) -> None:
    if serving.reload_url is not None:
        with closing(Client(serving.reload_url)) as client:
            client.ask("POST", "/collective_rpc", _RELOAD | {"args": [str(link.resolve())]})
    if serving.restart:
        try:
            done = subprocess.run(serving.restart, capture_output=True, text=True, check=False)
        except OSError as error:
            raise EngineError(
                f"{serving.restart[0]} cannot be started ({error.strerror}); correct "
                "serving.restart and run again"
            ) from None
        if done.returncode:
            said = " ".join(done.stderr.split())[-200:]
            raise EngineError(
                f"{serving.restart[0]} ended with code {done.returncode} ({said}); the link names "
                "the new draft: mend the command and run again"
            )


def counts(config: FollowConfig) -> BlockCounts | None:
    """The engine's counters since it started; None if they are not read, or it has none."""
    url = config.serving.metrics_url
    if url is None:
        return None
    with closing(Client(url)) as client:
        text = client.ask("GET", "/metrics")
    found = (block_counts(text, prefix) for prefix in _PREFIXES)
    return next((one for one in found if one is not None), None)
