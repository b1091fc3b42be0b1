"""The precision is the one that was measured as faster, unless somebody says otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.models import precision, wrap_model
from paceline.models.llama.packing import can_pack
from paceline.models.precision import choose_precision, measured_precisions, shapes_of
from paceline.models.prepare import choose_writer
from paceline.native import compiled
from paceline.train import align
from support.models import tiny_hf
from support.runs import align_config, write_pair

CPU = torch.device("cpu")
SHAPES = [(64, 32), (32, 64)]


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(precision.VARIABLE)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """Seconds of a product by the dtype that its inputs have, instead of real ones."""
    costs = {torch.float32: 1.0, torch.bfloat16: 1.0}
    now = [0.0]

    def costly(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        now[0] += costs[weight.dtype]
        return x

    monkeypatch.setattr(precision.F, "linear", costly)
    monkeypatch.setattr(precision, "_step", costly)
    monkeypatch.setattr(precision, "can_pack", lambda: False)
    monkeypatch.setattr(precision.time, "thread_time", lambda: now[0])
    return costs


@pytest.mark.parametrize("purpose", ["training", "reading", "decoding"])
def test_the_faster_precision_is_chosen_and_the_reason_names_both_times(purpose: Any, clock: Any):
    clock.update({torch.float32: 0.002, torch.bfloat16: 0.003})
    chosen = choose_precision(purpose, SHAPES, CPU)
    assert chosen == ("float32", f"measured for {purpose}: float32 4.0 ms, bfloat16 6.0 ms")


def test_of_equals_the_smaller_one_is_chosen(clock: Any):
    assert choose_precision("reading", SHAPES, CPU).precision == "bfloat16"


def test_times_are_kept_for_the_machine_and_its_level(clock: Any, monkeypatch: pytest.MonkeyPatch):
    clock[torch.float32] = 0.5
    first = choose_precision("reading", SHAPES, CPU)
    clock[torch.float32] = 2.0  # as on a machine that is busy by now
    assert choose_precision("reading", reversed(SHAPES), CPU) == first
    assert choose_precision("training", SHAPES, CPU).precision == "bfloat16", "other products"
    kept = {row["purpose"]: row["shapes"] for row in measured_precisions()}
    assert kept == {purpose: [[32, 64], [64, 32]] for purpose in ("reading", "training")}
    monkeypatch.setattr(precision, "level", lambda: "another")
    assert measured_precisions() == []
    assert choose_precision("reading", SHAPES, CPU).precision == "bfloat16"


def test_a_damaged_record_is_measured_again(clock: Any):
    chosen = choose_precision("reading", SHAPES, CPU)
    (record,) = (precision.cache_root() / "precision").iterdir()
    record.write_text("{")
    assert measured_precisions() == []
    assert choose_precision("reading", SHAPES, CPU) == chosen


def test_a_cache_that_cannot_be_written_does_not_matter(
    clock: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    assert choose_precision("reading", SHAPES, CPU).precision == "bfloat16"


def test_the_variable_overrides_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(precision.VARIABLE, "float32")
    assert choose_precision("training", SHAPES, CPU) == ("float32", "PACELINE_PRECISION is set")
    monkeypatch.setenv(precision.VARIABLE, "int4")
    with pytest.raises(UsageError, match="'int4', wanted float32 or bfloat16"):
        choose_precision("training", SHAPES, CPU)


def test_real_products_are_timed_on_one_thread_and_all_threads_come_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for purpose in ("training", "reading", "decoding"):
            chosen = choose_precision(purpose, SHAPES, CPU)
            assert chosen.precision in ("float32", "bfloat16")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_shapes_are_those_of_the_model():
    llama = tiny_hf("llama", hidden_size=32, intermediate_size=48, vocab_size=64).config
    assert shapes_of(llama) == [(32, 32), (48, 32), (32, 48), (64, 32)]
    gpt2 = tiny_hf("gpt2").config
    assert shapes_of(gpt2)[1] == (4 * gpt2.n_embd, gpt2.n_embd)


def test_writing_is_timed_on_the_model_itself(monkeypatch: pytest.MonkeyPatch):
    assert choose_writer(wrap_model(tiny_hf("gpt2")), 2).precision == "float32"
    model = wrap_model(tiny_hf("llama"))
    if can_pack() and compiled() is not None:
        assert choose_writer(model, 2).reason.startswith("measured for generating 2 rows: float32")
    monkeypatch.setenv(precision.VARIABLE, "bfloat16")
    assert choose_writer(model, 2) == ("bfloat16", "PACELINE_PRECISION is set")


def test_a_run_says_what_it_chose_and_keeps_it_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_pair(tmp_path / "pair")
    monkeypatch.setenv(precision.VARIABLE, "bfloat16")
    recipe = {"draft_fraction": 1.0, "fixed_fraction": 0.0, "precision": "auto"}
    config = align_config(folder, tmp_path / "run", **recipe)
    run = align(config)
    chosen = {"precision": "bfloat16", "reason": "PACELINE_PRECISION is set"}
    choices = json.loads((run / "manifest.json").read_text())["choices"]
    assert choices == {"precision": chosen, "writing": chosen}
    monkeypatch.setenv(precision.VARIABLE, "float32")
    longer = config.model_copy(update={"num_steps": (config.num_steps or 0) + 1})
    align(longer, resume=True)
    assert json.loads((run / "manifest.json").read_text())["choices"] == choices
