from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import validate
from paceline.errors import ConfigError
from paceline.studies.plan import PlannedStage, plan
from paceline.studies.study_file import StudyConfig

COST: dict[str, Any] = {"minutes": {"cpu": 1, "gpu": 2}, "disk_mb": 3}


def tau(**changes: Any) -> dict[str, Any]:
    settings = {
        "target": "$model",
        "runs": ["$output/align"],
        "tasks": {"text": "text.jsonl"},
        "num_prompts": 50,
        "output": "$output/tau",
    }
    stage = {"command": "trajectory", "outputs": ["$output/tau/rows.jsonl"]}
    return COST | stage | {"set": settings} | changes


def cells(**changes: Any) -> dict[str, Any]:
    settings = {
        "target": "$model",
        "draft": "d",
        "task": {"task": "text", "corpus": "a.txt"},
        "grid": {"rules": [{"rule": "lossless"}]},
        "num_examples": 20,
        "output": "$output/cells",
    }
    stage = {"command": "bench", "outputs": ["$output/cells/rows.jsonl"]}
    return COST | stage | {"set": settings} | changes


def planned(stages: dict[str, Any], scale: Any = "cpu", **changes: Any) -> list[PlannedStage]:
    values = {"title": "T", "output": "runs/x", "variables": {"model": "m"}}
    return plan(validate(StudyConfig, values | changes | {"stages": stages}), scale)


def test_stages_have_the_order_of_the_file():
    draft = COST | {
        "command": "draft",
        "set": {"target": "$model", "out": "$output/draft", "layers": [0]},
        "outputs": ["$output/draft/model.safetensors"],
    }
    names = [one.name for one in planned({"draft": draft, "tau": tau()})]
    assert names == ["draft", "tau"]


def test_a_scale_overrides_the_settings_of_a_stage():
    stage = tau(scales={"smoke": {"num_prompts": 4}, "gpu": {"num_prompts": 9, "seed": 5}})
    found = {scale: planned({"tau": stage}, scale) for scale in ("cpu", "gpu", "smoke")}
    counts = {key: [one.config["num_prompts"] for one in found[key]] for key in found}
    assert counts == {"cpu": [50], "gpu": [9], "smoke": [4]}
    assert [found[key][0].config.get("seed") for key in found] == [None, 5, None]


def test_variables_are_replaced_once(tmp_path: Path):
    """A value may hold a dollar sign, and $$ is one."""
    file = tmp_path / "tau.yaml"
    file.write_text(yaml.safe_dump({"tasks": {"text": {"path": "$$5.jsonl"}}}))
    settings = {key: value for key, value in tau()["set"].items() if key != "tasks"}
    stage = tau(set=settings, config=str(file))
    (found,) = planned({"tau": stage}, variables={"model": "costs $5"})
    assert found.config["target"] == "costs $5"
    assert found.config["tasks"]["text"]["path"] == "$5.jsonl"
    assert found.folder == Path("runs/x/tau")
    assert found.outputs == (Path("runs/x/tau/rows.jsonl"),)


def test_a_dollar_in_a_configuration_file_is_no_crash(tmp_path: Path):
    file = tmp_path / "tau.yaml"
    file.write_text(yaml.safe_dump({"tasks": {"text": "a"}, "device": "costs $5"}))
    with pytest.raises(ConfigError, match=r"stage tau: .*tau\.yaml has a \$ that is no variable"):
        planned({"tau": tau(config=str(file))})


def test_settings_of_one_plan_do_not_reach_another():
    stage = tau(set=tau()["set"] | {"tasks": {"text": {"path": "a"}}, "tasks.text.limit": 3})
    values = {"title": "T", "output": "runs/x", "variables": {"model": "m"}}
    study = validate(StudyConfig, values | {"stages": {"tau": stage}})
    (first,), (second,) = plan(study), plan(study)
    for one in (first, second):
        assert one.config["tasks"]["text"] == {"path": "a", "limit": 3}
    first.config["tasks"]["text"]["path"] = "b"
    assert second.config["tasks"]["text"]["path"] == "a"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"a": tau(), "b": tau()}, "stages a and b both write runs/x/tau"),
        (
            {"a": tau(set=tau()["set"] | {"output": "$output"})},
            "a writes to runs/x, which is not a directory of its own in the study's",
        ),
        (
            {"a": tau(set=tau()["set"] | {"output": "runs/garden"})},
            r"writes to runs/garden, which is not .*; set its output to \$output/a",
        ),
        (
            {"a": tau(set=tau()["set"] | {"output": "$output/../garden"})},
            r"writes to runs/x/../garden, which is not a directory of its own in the study's",
        ),
        ({"a": tau(set=tau()["set"] | {"output": "$output/logs"})}, "is not a directory of its"),
        (
            {"a": tau(set=tau()["set"] | {"output": "$output/tau/0"})},
            "a writes to runs/x/tau/0, so its outputs must be files in it",
        ),
        (
            {"a": tau(), "b": cells(outputs=["$output/b/x"])},
            "b writes to runs/x/cells, so its outputs must be files in it",
        ),
        (
            {"a": cells(), "b": tau(set=tau()["set"] | {"output": "$output/cells"})},
            "is not a directory of its own|must be files in it|both write",
        ),
        ({"a": tau(set={"target": "x", "num_prompts": 3})}, "^stage a: .*runs.* missing"),
        ({"a": tau(set=tau()["set"] | {"promptz": 1})}, "^stage a: promptz: unknown key"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(stages: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        planned(stages)


def test_a_model_among_the_inputs_stands_for_its_files(tmp_path: Path):
    model = tmp_path / "model"
    (model / "checkpoints").mkdir(parents=True)
    for name in ("weights", "config.json"):
        (model / name).write_text(name)
    one, *_ = planned({"tau": tau(inputs=[str(model), "corpus.jsonl"], outputs=tau()["outputs"])})
    assert one.inputs == (model / "config.json", model / "weights", Path("corpus.jsonl"))
