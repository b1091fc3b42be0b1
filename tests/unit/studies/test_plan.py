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
        "output": "$output/tau/$look",
    }
    stage = {"command": "trajectory", "outputs": ["$output/tau/$look/rows.jsonl"]}
    return COST | stage | {"set": settings} | changes


def cells(**changes: Any) -> dict[str, Any]:
    settings = {
        "target": "$model",
        "draft": "d",
        "task": {"task": "text", "corpus": "a.txt"},
        "grid": {"rules": [{"rule": "lossless"}]},
        "num_examples": 20,
        "output": "$output/cells/$look",
    }
    stage = {"command": "bench", "outputs": ["$output/cells/$look/rows.jsonl"]}
    return COST | stage | {"set": settings} | changes


def planned(stages: dict[str, Any], scale: Any = "cpu", **changes: Any) -> list[PlannedStage]:
    values = {"title": "T", "output": "runs/x", "variables": {"model": "m"}, "looks": 3}
    return plan(validate(StudyConfig, values | changes | {"stages": stages}), scale)


@pytest.mark.parametrize(
    ("stage", "count", "skip"),
    [(tau(), "num_prompts", "skip_prompts"), (cells(), "num_examples", "skip_examples")],
    ids=["trajectory", "bench"],
)
@pytest.mark.parametrize("first", [0, 7])
def test_looks_follow_each_other_without_a_gap_or_an_example_in_common(
    stage: dict[str, Any], count: str, skip: str, first: int
):
    stage = stage | {"set": stage["set"] | {skip: first}}
    looks = [one.config for one in planned({"a": stage})]
    seen = [range(one.get(skip, 0), one.get(skip, 0) + one[count]) for one in looks]
    assert [number for part in seen for number in part] == list(
        range(first, first + 3 * looks[0][count])
    )


def test_stages_without_a_look_are_planned_once():
    draft = COST | {
        "command": "draft",
        "set": {"target": "$model", "out": "$output/draft", "layers": [0]},
        "outputs": ["$output/draft/model.safetensors"],
    }
    names = [one.name for one in planned({"draft": draft, "tau": tau()})]
    assert names == ["draft", "tau-look-0", "tau-look-1", "tau-look-2"]


def test_a_scale_overrides_the_settings_of_a_stage_before_its_looks():
    stage = tau(scales={"smoke": {"num_prompts": 4}, "gpu": {"num_prompts": 9, "seed": 5}})
    found = {scale: planned({"tau": stage}, scale) for scale in ("cpu", "gpu", "smoke")}
    skipped = {key: [one.config["skip_prompts"] for one in found[key]] for key in found}
    assert skipped == {"cpu": [0, 50, 100], "gpu": [0, 9, 18], "smoke": [0, 4, 8]}
    assert [found[key][0].config.get("seed") for key in found] == [None, 5, None]


def test_variables_are_replaced_once(tmp_path: Path):
    """A value may hold a dollar sign, and $$ is one."""
    file = tmp_path / "tau.yaml"
    file.write_text(yaml.safe_dump({"tasks": {"text": {"path": "$$5.jsonl"}}}))
    settings = {key: value for key, value in tau()["set"].items() if key != "tasks"}
    stage = tau(set=settings, config=str(file))
    found = planned({"tau": stage}, variables={"model": "costs $5"})
    assert found[0].config["target"] == "costs $5"
    assert found[0].config["tasks"]["text"]["path"] == "$5.jsonl"
    assert found[0].folder == Path("runs/x/tau/0")
    assert found[2].outputs == (Path("runs/x/tau/2/rows.jsonl"),)


def test_a_dollar_in_a_configuration_file_is_no_crash(tmp_path: Path):
    file = tmp_path / "tau.yaml"
    file.write_text(yaml.safe_dump({"tasks": {"text": "a"}, "device": "costs $5"}))
    with pytest.raises(ConfigError, match=r"stage tau: .*tau\.yaml has a \$ that is no variable"):
        planned({"tau": tau(config=str(file))})


def test_settings_of_one_look_do_not_reach_another():
    stage = tau(set=tau()["set"] | {"tasks": {"text": {"path": "a"}}, "tasks.text.limit": 3})
    found = planned({"tau": stage})
    assert all(one.config["tasks"]["text"] == {"path": "a", "limit": 3} for one in found)
    found[0].config["tasks"]["text"]["path"] = "b"
    assert found[1].config["tasks"]["text"]["path"] == "a"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"a": tau(), "b": tau()}, "stages a-look-0 and b-look-0 both write runs/x/tau/0"),
        (
            {"a": tau(set=tau()["set"] | {"output": "$output"})},
            "a-look-0 writes to runs/x, which is not a directory of its own in the study's",
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
            {"a": tau(set=tau()["set"] | {"output": "$output/tau"})},
            "so its outputs must be files in it|both write runs/x/tau",
        ),
        (
            {"a": tau(), "b": cells(outputs=["$output/b/$look/x"])},
            "b-look-0 writes to runs/x/cells/0, so its outputs must be files in it",
        ),
        (
            {"a": cells(), "b": tau(set=tau()["set"] | {"output": "$output/cells"})},
            "is not a directory of its own|must be files in it|both write",
        ),
        ({"a": tau(set={"target": "x", "num_prompts": 3})}, "^stage a: .*runs: Field required"),
        ({"a": tau(set=tau()["set"] | {"promptz": 1})}, "^stage a: promptz: unknown key"),
        (
            {"a": cells(set={k: v for k, v in cells()["set"].items() if k != "num_examples"})},
            r"stage a: \$look needs num_examples; set it",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused(stages: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        planned(stages)


def test_only_commands_that_skip_examples_have_looks():
    draft = COST | {
        "command": "draft",
        "set": {"target": "$model", "out": "$output/$look", "layers": [0]},
        "outputs": ["$output/$look/model.safetensors"],
    }
    with pytest.raises(ConfigError, match=r"\$look is for .*, not draft; remove it"):
        planned({"draft": draft})


def test_a_model_among_the_inputs_stands_for_its_files(tmp_path: Path):
    model = tmp_path / "model"
    (model / "checkpoints").mkdir(parents=True)
    for name in ("weights", "config.json"):
        (model / name).write_text(name)
    one, *_ = planned({"tau": tau(inputs=[str(model), "corpus.jsonl"], outputs=tau()["outputs"])})
    assert one.inputs == (model / "config.json", model / "weights", Path("corpus.jsonl"))
