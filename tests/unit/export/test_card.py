"""The model card of an export, as huggingface_hub reads it."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from paceline.config import validate
from paceline.errors import ConfigError
from paceline.export import ExportConfig, export
from paceline.measure import MeasureConfig, measure
from paceline.records import RunDirectory
from paceline.train import align
from support.runs import align_config


@pytest.mark.parametrize("key", ["push", "private"])
def test_a_configuration_publishes_nothing(key: str):
    values = {"model": "m", "to": "vllm", "out": "o", key: "lab/draft"}
    with pytest.raises(ConfigError, match=f"{key}: unknown key"):
        validate(ExportConfig, values)


@pytest.mark.slow
def test_the_card_has_what_the_hub_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Target, its relation, data set, figures of the measurement."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--lab--target"
    shutil.copytree(folder / "target", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(align(align_config(folder, tmp_path / "run", target="lab/target")))
    manifest = json.loads(run.manifest.read_text())
    manifest["config"]["data"]["train"]["path"] = "lab/texts"
    del manifest["inputs"]["data.train"]  # texts of the hub have no fingerprint
    run.manifest.write_text(json.dumps(manifest))
    draft = str(run.path / "draft")
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 8, "pass_repeats": 1}
    models = {"target": "lab/target", "draft": draft, "prompts": str(folder / "corpus.jsonl")}
    greedy = {"draft_sampling": {"temperature": 0}, "timed_prompts": 2, "gammas": [2]}
    found = measure(validate(MeasureConfig, {**models, **small, **greedy}))
    (tmp_path / "m.json").write_text(found.model_dump_json())
    named = {"model": draft, "target": "lab/target", "measurement": str(tmp_path / "m.json")}
    export(validate(ExportConfig, named | {"to": "vllm", "out": str(tmp_path / "out")}))
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (card.base_model, card["base_model_relation"]) == ("lab/target", "finetune")
    assert card.datasets == ["lab/texts"]
    figures = {one.metric_type: one for one in card.eval_results or ()}
    values = json.loads((tmp_path / "m.json").read_text())
    acceptance = values["acceptance"]["expected_acceptance"]["value"]
    assert figures["expected_acceptance"].metric_value == pytest.approx(acceptance, abs=5e-5)
    assert figures["expected_acceptance"].dataset_name == "corpus.jsonl"
    speedup = values["speed"]["speedup"]["value"]
    assert figures["speedup"].metric_value == pytest.approx(speedup, abs=5e-5)
    assert figures["speedup"].metric_name == "speedup, gamma 2"
