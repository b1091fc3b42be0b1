"""`paceline env`: versions and hardware, for a report of a bug or a figure."""

from __future__ import annotations

import json

import typer


def env() -> None:
    """Print versions, hardware and git state as JSON."""
    from paceline.models.precision import measured_precisions
    from paceline.native import compiled
    from paceline.records import environment

    facts = {"compiled": compiled() is not None, "precision": measured_precisions()}
    typer.echo(json.dumps(environment() | facts, indent=2))
