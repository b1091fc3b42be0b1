import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from paceline.errors import ConfigError, StorageError
from paceline.models import CausalModel, load_model
from paceline.records import RunDirectory, append_jsonl, read_jsonl
from paceline.train.checkpoint import (
    CheckpointStore,
    TrainingState,
    check_run_directory,
    read_optimizer,
    read_state,
    rewind_metrics,
    saved_model,
)
from support.models import tiny_pair
from support.runs import align_config


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", folder / "target", keep=2)


def trained_draft() -> tuple[CausalModel, torch.optim.Optimizer]:
    """A draft after one step, so that the optimiser has moments."""
    draft = tiny_pair()[1]
    optimizer = torch.optim.AdamW(draft.hf.parameters(), lr=0.1)
    draft.hf(torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    return draft, optimizer


def test_what_was_saved_comes_back_bit_for_bit(store: CheckpointStore):
    draft, optimizer = trained_draft()
    state = TrainingState(step=7, elapsed_s=1.25, num_drawn=28, recent_losses=[0.1, 1 / 3])
    path = store.save(draft, optimizer.state_dict(), state)
    assert store.latest() == path
    assert read_state(path) == state
    again = load_model(saved_model(path), dtype="float32", device="cpu")
    for name, weight in draft.hf.state_dict().items():
        assert torch.equal(again.hf.state_dict()[name], weight)
    fresh = torch.optim.AdamW(again.hf.parameters(), lr=0.1)
    fresh.load_state_dict(read_optimizer(path))
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_the_state_of_a_gpu_is_read_where_there_is_none(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    draft, optimizer = trained_draft()
    monkeypatch.setattr("torch.serialization.location_tag", lambda _storage: "cuda:0")
    path = store.save(draft, optimizer.state_dict(), TrainingState(step=1))
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(path / "optimizer.pt", weights_only=True)
    found = read_optimizer(path)["state"]
    assert torch.equal(found[0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_leavings_of_a_killed_run_are_swept_and_never_taken_for_a_checkpoint(
    store: CheckpointStore,
):
    half = store.directory / ".step-00000012.abc"
    half.mkdir(parents=True)
    (half / "state.json").write_text("{")
    assert store.latest() is None
    assert read_state(store.latest()) == TrainingState()
    store.sweep()
    assert not half.exists()


def test_a_kill_while_an_old_one_goes_leaves_no_half_of_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    draft, optimizer = trained_draft()
    with monkeypatch.context() as killed:
        killed.setattr("paceline.train.checkpoint.shutil.rmtree", Mock(side_effect=SystemExit))
        store.save(draft, optimizer.state_dict(), TrainingState(step=1))
        store.save(draft, optimizer.state_dict(), TrainingState(step=2))
        with pytest.raises(SystemExit):
            store.save(draft, optimizer.state_dict(), TrainingState(step=3))
    assert [path.name for path in store.all()] == ["step-00000002", "step-00000003"]
    store.sweep()
    assert len(list(store.directory.iterdir())) == 2


@pytest.mark.parametrize("fills", ["weights", "optimiser"])
def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, fills: str
):
    """Files end at 40 kB: larger than a tokenizer, smaller than the weights or the moments."""
    draft, optimizer = trained_draft()
    first = store.save(draft, optimizer.state_dict(), TrainingState(step=1))
    if fills == "optimiser":
        monkeypatch.setattr("paceline.train.checkpoint.save_draft", lambda *_: None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"step-00000002.*the disk is full"):
            store.save(draft, optimizer.state_dict(), TrainingState(step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in store.directory.iterdir()] == [first.name]
    load_model(saved_model(first))


def test_a_run_directory_is_entered_only_by_its_own_run(folder: Path, tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    config = align_config(folder, run.path)
    check_run_directory(run, config, resume=False)
    run.write_manifest(config)
    # whatever was wrong with the first try, it left nothing that could be lost
    check_run_directory(run, align_config(folder, run.path, batch_size=8), resume=False)
    run.metrics.touch()
    check_run_directory(run, align_config(folder, run.path, batch_size=8), resume=False)
    append_jsonl(run.metrics, {"step": 0})
    with pytest.raises(ConfigError, match="already holds a run; resume it"):
        check_run_directory(run, config, resume=False)
    check_run_directory(run, config, resume=True)
    longer = align_config(folder, run.path, num_steps=20)
    check_run_directory(run, longer, resume=True)
    other = align_config(folder, run.path, batch_size=8)
    with pytest.raises(ConfigError, match=r"another batch_size \(batch_size was 4, is now 8"):
        check_run_directory(run, other, resume=True)


def test_metrics_of_steps_that_are_made_again_are_dropped(tmp_path: Path):
    run = RunDirectory(tmp_path)
    for step in range(5):
        append_jsonl(run.metrics, {"step": step})
    with run.metrics.open("a") as stream:
        stream.write('{"step": 5, "lo')  # torn by a kill
    rewind_metrics(run, 3)
    assert [row["step"] for row in read_jsonl(run.metrics)] == [0, 1, 2, 3]
