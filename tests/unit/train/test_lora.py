"""Adapters of a draft: what moves, that peft merges them alike, and that stops change nothing."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.errors import ConfigError, UsageError
from paceline.models import load_model
from paceline.models.hf.draft_vocabulary import write_draft_vocabulary
from paceline.train import AlignConfig, align
from paceline.train.loop import TrainingLoop
from support.models import save_tiny
from support.runs import align_config, held_out, losses

LORA = {"rank": 3, "alpha": 7.0}
pytestmark = [  # what peft says when it makes adapters
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_model(path, dtype="float32").hf.state_dict()


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    return align(align_config(folder, out, lora=LORA, **held_out(folder)))


def test_only_linear_layers_move_and_by_a_matrix_of_low_rank(folder: Path, run: Path):
    before, after = weights(folder / "draft"), weights(run / "draft")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    for name in moved:
        change = (after[name] - before[name]).double()
        values = torch.linalg.svdvals(change)
        assert values[2] > 1e-3 * values[0]
        assert values[3] < 1e-5 * values[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_merges_the_adapter_to_the_same_draft(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("peft")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "draft", kind, seed=3)
    draft = str(tmp_path / "draft")
    write_draft_vocabulary(tmp_path / "draft", torch.arange(200))
    made = align(align_config(folder, tmp_path / "run", lora=LORA, draft=draft, num_steps=4))
    ours, theirs = weights(made / "draft"), weights(made / "adapter")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    lists = [load_model(made / name).draft_vocabulary for name in ("draft", "adapter")]
    assert [None if each is None else each.tolist() for each in lists] == [[*range(200)]] * 2


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(folder: Path, tmp_path: Path, run: Path):
    config = align_config(
        folder, tmp_path / "run", lora=LORA, **held_out(folder), checkpoints={"every_steps": 4}
    )
    advance, steps = TrainingLoop._advance, iter(range(6))

    def stopping(loop: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        advance(loop)

    with patch.object(TrainingLoop, "_advance", stopping), pytest.raises(KeyboardInterrupt):
        align(config)
    align(config, resume=True)
    assert losses(tmp_path / "run") == losses(run)
    for name, wanted in weights(run / "draft").items():
        assert torch.equal(weights(tmp_path / "run" / "draft")[name], wanted)


def test_an_adapter_learns_to_read_masks(folder: Path, tmp_path: Path):
    parallel = {"num_tokens": 3, "anchors": 8, "mask_token": 60}
    made = align(align_config(folder, tmp_path / "run", lora=LORA, parallel=parallel, num_steps=2))
    before, after = weights(folder / "draft"), weights(made / "draft")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    assert load_model(made / "draft").mask_token == 60


def test_an_adapter_is_trained_by_an_optimizer_that_moves_zeros():
    given: dict[str, Any] = {"target": "t", "draft": "d", "output": "o", "data": {"train": "x"}}
    given["num_steps"] = 1
    assert AlignConfig(**given).optimizer.kind == "adafactor"
    assert AlignConfig(**given, lora=LORA).optimizer.kind == "adamw"
    rate = AlignConfig(**given, lora=LORA, optimizer={"learning_rate": 2e-4}).optimizer
    assert (rate.kind, rate.learning_rate) == ("adamw", 2e-4)
    named = AlignConfig(**given, lora=LORA, optimizer={"kind": "adafactor"})
    assert named.optimizer.kind == "adafactor"


def test_what_takes_no_adapter_is_refused_in_one_line(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="lora trains no weight of the draft; unset freeze_"):
        align_config(folder, tmp_path / "run", lora=LORA, freeze_layers=1)
    for name, seed in (("target", 0), ("draft", 1)):
        save_tiny(tmp_path / name, "t5", seed=seed)
    places = {name: str(tmp_path / name) for name in ("target", "draft")}
    with pytest.raises(UsageError, match="adapters of encoder-decoders are not trained"):
        align(align_config(folder, tmp_path / "run", lora=LORA, **places))
