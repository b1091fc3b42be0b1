"""`paceline env`: versions and hardware, for a report of a bug or a figure."""

from __future__ import annotations

import json

import typer


def env() -> None:
    """Print versions, hardware and git state as JSON."""
    from paceline.native import compiled
    from paceline.records import environment

    typer.echo(json.dumps({**environment(), "compiled": compiled() is not None}, indent=2))
