"""What the command line prints on stderr when something is wrong."""


def one_line(err: str) -> str:
    """The only line on stderr, which is Paceline's own."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("paceline: ")
    return lines[0]
