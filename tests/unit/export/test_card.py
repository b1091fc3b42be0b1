"""The model card of an export, as huggingface_hub reads it."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from paceline.config import validate
from paceline.export import ExportConfig, export
from paceline.records import RunDirectory
from paceline.train import align
from support.runs import align_config


@pytest.mark.slow
def test_the_card_has_what_the_hub_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The target and its relation."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--lab--target"
    shutil.copytree(folder / "target", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(align(align_config(folder, tmp_path / "run", target="lab/target")))
    draft = str(run.path / "draft")
    named = {"model": draft, "target": "lab/target", "to": "vllm", "out": str(tmp_path / "out")}
    export(validate(ExportConfig, named))
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (card.base_model, card["base_model_relation"]) == ("lab/target", "finetune")
