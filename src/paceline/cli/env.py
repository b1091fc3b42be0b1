"""`paceline env`: versions and hardware, for a report of a bug or a figure."""

from __future__ import annotations

import json

import typer


def env() -> None:
    """Print versions, hardware and git state as JSON."""
    from paceline.records import environment

    typer.echo(json.dumps(environment(), indent=2))
