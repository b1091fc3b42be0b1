"""The precision of "auto" is that of the device, unless somebody says otherwise."""

import json
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.models import precision
from paceline.models.precision import choose_precision
from paceline.train import align
from support.runs import align_config, write_pair

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(precision.VARIABLE)


def test_bfloat16_needs_amx_or_a_card_with_it(monkeypatch: pytest.MonkeyPatch):
    for level, wanted in (("avx2", "float32"), ("avx512_bf16", "float32"), ("amx", "bfloat16")):
        monkeypatch.setattr(precision, "level", lambda level=level: level)
        assert choose_precision(CPU) == (wanted, f"the faster precision of processor level {level}")
    for native, wanted in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert choose_precision(torch.device("cuda")).precision == wanted


def test_the_variable_overrides_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(precision.VARIABLE, "float32")
    assert choose_precision(CPU) == ("float32", "PACELINE_PRECISION is set")
    monkeypatch.setenv(precision.VARIABLE, "int4")
    with pytest.raises(UsageError, match="'int4', wanted float32 or bfloat16"):
        choose_precision(CPU)


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
    assert choices == {"precision": chosen}
    monkeypatch.setenv(precision.VARIABLE, "float32")
    longer = config.model_copy(update={"num_steps": (config.num_steps or 0) + 1})
    align(longer, resume=True)
    assert json.loads((run / "manifest.json").read_text())["choices"] == choices
