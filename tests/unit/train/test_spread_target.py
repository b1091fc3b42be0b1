"""Alignment with a target that is spread over several GPUs, here devices in name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.models import HfModel, load_model, wrap_model
from paceline.train import align
from paceline.train.align import _load_target
from support.devices import NamedDevices, device_of, halves, spread
from support.runs import align_config, held_out, losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_a_draft_learns_the_same_from_a_spread_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = align(align_config(folder, tmp_path / "plain", num_steps=3, **held_out(folder)))
    targets: list[HfModel] = []

    def load_spread(path: Path, **options: Any) -> HfModel:
        found = load_model(path, **options)
        hf = spread(found.hf, halves(found.hf), ("cpu", "cuda:1"))
        targets.append(wrap_model(hf, found.tokenizer))
        return targets[-1]

    monkeypatch.setitem(_load_target.__globals__, "load_model", load_spread)
    with NamedDevices():
        run = align(align_config(folder, tmp_path / "spread", num_steps=3, **held_out(folder)))
    (target,) = targets
    assert {str(device_of(weight)) for weight in target.hf.parameters()} == {"cpu", "cuda:1"}
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("device", "world_size", "shard", "chosen"),
    [
        ("cuda", 1, [], "auto"),  # the device of accelerate's single process
        ("cpu", 1, [], "cpu"),
        ("cuda:1", 2, [], "cuda:1"),
        ("cuda:1", 2, ["target"], "cpu"),
    ],
)
def test_a_single_process_may_spread_its_target(
    device: str,
    world_size: int,
    shard: list[str],
    chosen: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    model, seen = load_model(folder / "target"), list[str]()

    def load(_path: Path, *, dtype: str, device: str) -> HfModel:
        assert dtype == "bfloat16"
        seen.append(device)
        return model

    monkeypatch.setitem(_load_target.__globals__, "load_model", load)
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device(device)),
        shard=SimpleNamespace(world_size=world_size),
    )
    config = align_config(folder, tmp_path / "run", shard=shard)
    assert _load_target(config, cast("Any", run), bfloat16=True) is model
    assert seen == [chosen]
