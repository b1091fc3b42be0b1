"""What the command line prints on stderr when something is wrong."""

import re

_PROGRESS = re.compile(r"starting|[a-z ]+ \d+%.*")


def one_line(err: str) -> str:
    """The only line on stderr, which is Paceline's own; beside progress, on a slow machine."""
    lines = [line for line in err.strip().splitlines() if not _PROGRESS.fullmatch(line)]
    assert len(lines) == 1, err
    assert lines[0].startswith("paceline: ")
    return lines[0]
