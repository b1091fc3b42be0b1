"""The draft that the engine loads, and what the engine counts.

`output/draft` is a link to a directory in `output/served`. A link is replaced in one step, so that
an engine that starts at any moment loads a whole draft.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engines.client import Client
from paceline.engines.servers import block_counts
from paceline.errors import EngineError
from paceline.export import ExportConfig, export
from paceline.processes import environment_for_engines
from paceline.records import atomic_write_text, storage_errors

if TYPE_CHECKING:
    from paceline.engines.contract import BlockCounts
    from paceline.follow.config import FollowConfig, Serving

LINK = "draft"
_TOLD = ".told"  # has the name of the draft that the engine was told of
_PREFIXES = ("vllm:", "llamacpp:")  # of counters
_RESTART_S = 900


def serve(config: FollowConfig, name: str, model: Path) -> None:
    """Export a draft, let the link name it, and tell the engine; does nothing once that is done.

    The engine is not told of the first draft, with which it is started.

    Raises:
        EngineError: the engine did not load it. The link names it already.
        StorageError: the link cannot be written.
    """
    link, told = config.output / LINK, config.output / _TOLD
    before = told.read_text("utf-8") if told.exists() else name
    to, gamma = config.serving.to, config.judging.num_speculative_tokens
    # a GGUF file in it has the name of its directory
    path = Path("served") / f"{name}-{to}-{gamma}" / LINK
    out = config.output / path
    if not out.exists():
        given = {"to": to, "out": out, "num_speculative_tokens": gamma}
        export(ExportConfig(model=str(model), target=config.target, **given))
    if not link.is_symlink() or link.readlink() != path:
        scratch = link.with_name(f".{LINK}.new")
        with storage_errors(link):
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(path)
            scratch.replace(link)
    if before != name:
        _tell(config.serving, link)
    atomic_write_text(told, name)


def _tell(serving: Serving, link: Path) -> None:
    if serving.reload_url is not None:
        with closing(Client(serving.reload_url)) as client:
            body = {"method": "reload_draft", "args": [str(link.absolute())]}
            client.ask("POST", "/collective_rpc", body)
    if not serving.restart:
        return
    try:
        with tempfile.TemporaryFile() as log:  # no pipe: a server that it starts would hold it
            done = subprocess.run(
                serving.restart,
                stdout=log,
                stderr=log,
                env=environment_for_engines(),
                check=False,
                timeout=_RESTART_S,
            )
            log.seek(0)
            written = log.read().decode("utf-8", errors="replace")
        said = f"ended with code {done.returncode} ({' '.join(written.split())[-200:]})"
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, said = True, f"failed ({' '.join(str(error).split())[-200:]})"
    if failed:
        raise EngineError(
            f"{serving.restart[0]} {said}; the link names the new draft: mend serving.restart and "
            "run again"
        )


def counts(config: FollowConfig) -> BlockCounts | None:
    """The engine's counters since it started; None if they are not read.

    Raises:
        EngineError: it cannot be reached, or counts no drafts.
    """
    url = config.serving.metrics_url
    if url is None:
        return None
    with closing(Client(url)) as client:
        text = client.ask("GET", "/metrics")
    for prefix in _PREFIXES:
        if (found := block_counts(text, prefix)) is not None:
            return found
    raise EngineError(
        f"{url} counts no drafted tokens; serve with a draft, or unset serving.metrics_url"
    )
