"""Every smoke configuration of alignment, through the real command line, on a tiny random model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligning import losses, write_pair

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"


@pytest.mark.parametrize("name", [path.name for path in sorted(SMOKE.glob("align*.yaml"))])
def test_a_smoke_configuration_raises_the_acceptance_and_ends_in_a_draft(name: str, tmp_path: Path):
    write_pair(tmp_path / "tiny")
    paceline = [sys.executable, "-m", "paceline.cli.main"]
    done = subprocess.run(
        [*paceline, "align", "--config", SMOKE / name, "--output", "run", "--set", "device=cpu"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "run/draft" in done.stdout
    assert len(losses(tmp_path / "run")) == 12
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["after"]["expected_acceptance"] > result["before"]["expected_acceptance"]
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()
