"""The log of a server."""

import sys
from pathlib import Path

from paceline.engines.process import ServerProcess


def test_the_log_replaces_a_link_and_follows_none(tmp_path: Path):
    log, victim = tmp_path / "logs/server.log", tmp_path / "victim"
    victim.write_text("precious")
    log.parent.mkdir()
    log.symlink_to(victim)
    for word in ("first", "second"):
        with ServerProcess([sys.executable, "-c", f"print('{word}')"], 1, log) as server:
            assert word in server.last_words()
    assert not log.is_symlink()
    assert log.read_text() == "second\n"
    assert victim.read_text() == "precious"
