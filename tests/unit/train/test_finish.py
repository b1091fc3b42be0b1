"""A run whose last part has another objective."""

import shutil
from pathlib import Path

from paceline.train import align
from paceline.train.checkpoint import read_state
from support.runs import align_config, losses


def test_a_finish_on_another_scale_is_no_explosion(folder: Path, tmp_path: Path):
    """TVD is at most its weight of 0.01; the forward KL of this pair begins near 10."""
    finish = {"objective": "forward_kl", "begin": 0.6}
    changes = {"objective": {"kind": "tvd", "weight": 0.01}, "finish": finish}
    run = align(align_config(folder, tmp_path / "run", num_steps=50, **changes))
    assert max(losses(run)[:30]) < 0.01
    assert min(losses(run)[-3:]) > 0.1, "ten times the usual loss, three times in a row"


def test_a_run_that_is_resumed_knows_which_objective_its_recent_losses_are_of(
    folder: Path, tmp_path: Path
):
    changes = {"objective": {"kind": "tvd", "weight": 0.01}, "max_loss_ratio": 10.0}
    changes["finish"] = {"objective": "forward_kl", "begin": 0.5}
    often = {"checkpoints": {"every_steps": 25}}
    whole = align(align_config(folder, tmp_path / "run", num_steps=50, **changes, **often))
    states = [read_state(path) for path in sorted((whole / "checkpoints").iterdir())]
    assert [(state.phase, len(state.recent_losses)) for state in states] == [(0, 25), (1, 25)]
    shutil.rmtree(whole / "checkpoints" / "step-00000050")
    (whole / "result.json").unlink()
    before = losses(whole)
    assert (
        losses(align(align_config(folder, whole, num_steps=50, **changes), resume=True)) == before
    )
