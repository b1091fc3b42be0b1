"""The parts of `make papers` by their files: what one reads, another makes or the source has."""

from pathlib import Path
from typing import Any

from papers import dodo


def parts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in ("garden", "tune", "draw", "rows", "readme"):
        for part in getattr(dodo, f"task_{name}")():
            full = f"{name}:{part['name']}"
            assert full not in found
            found[full] = part
    return found


def test_every_file_that_a_part_reads_is_there_or_made():
    made = {str(one) for part in parts().values() for one in part.get("targets", ())}
    made |= {str(one) for one in dodo.task_start()["targets"]}
    for name, part in parts().items():
        for path in map(str, part["file_dep"]):
            assert path in made or Path(path).exists(), (name, path)
    draws = [one for name, one in parts().items() if name.startswith("draw:")]
    read = [
        path
        for name, one in parts().items()
        if name.startswith("rows:")
        for path in one["file_dep"]
    ]
    assert sorted(map(str, read)) == sorted(str(one["targets"][0]) for one in draws)
