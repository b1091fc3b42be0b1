"""The command of an export serves what was measured; a measurement of anything else is refused."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from aligning import write_pair
from paceline.config import validate
from paceline.errors import ConfigError, UsageError
from paceline.export import ExportConfig, export
from paceline.measure import MeasureConfig, measure

SMALL = {
    "num_prompts": 4,
    "max_prompt_tokens": 6,
    "max_new_tokens": 8,
    "gammas": [2, 1],
    "pass_repeats": 1,
    "timed_prompts": 0,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def measured(folder: Path, place: Path, draft_temperature: float | None, **changes: Any) -> Path:
    """A measurement of the pair at temperature 1."""
    values = SMALL | {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "prompts": str(folder / "corpus.jsonl"),
    }
    if draft_temperature is not None:
        values["draft_sampling"] = {"temperature": draft_temperature}
    found = measure(validate(MeasureConfig, values | changes))
    place.write_text(found.model_dump_json())
    return place


def command(folder: Path, out: Path, to: str, **values: Any) -> str:
    given = {
        "model": str(folder / "draft"),
        "target": str(folder / "target"),
        "out": str(out),
        "to": to,
    }
    found = export(validate(ExportConfig, given | values)).command
    assert found is not None
    return found


def test_each_engine_is_told_to_draft_as_many_tokens(folder: Path, tmp_path: Path):
    common = {"num_speculative_tokens": 5}
    vllm = shlex.split(command(folder, tmp_path / "v", "vllm", **common))
    assert vllm[:3] == ["vllm", "serve", str(folder / "target")]
    assert json.loads(vllm[-1]) == {
        "method": "draft_model",
        "model": str(tmp_path / "v"),
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
    }
    sglang = shlex.split(command(folder, tmp_path / "s", "sglang", **common))
    # the root of a block counts there
    assert sglang[-6:] == [
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "6"),
    ]
    llama = shlex.split(command(folder, tmp_path / "l", "llamacpp", **common))
    assert (
        llama[llama.index("--spec-type") + 1] == "draft-simple"
    )  # else the draft is loaded for nothing
    assert llama[llama.index("--spec-draft-n-max") + 1] == "5"
    assert llama[llama.index("-md") + 1] == str(tmp_path / "l" / "l-f32.gguf")


def test_transformers_reads_from_the_drafts_own_settings(folder: Path, tmp_path: Path):
    command(folder, tmp_path / "t", "transformers", num_speculative_tokens=5)
    settings = json.loads((tmp_path / "t" / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 5
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0.0


def test_the_best_gamma_is_that_of_the_measurement(folder: Path, tmp_path: Path):
    path = measured(folder, tmp_path / "m.json", 0.0)
    values = json.loads(path.read_text())
    expected = (
        values["best_gamma"]
        or max(values["gammas"], key=lambda row: row["expected_speedup"])["gamma"]
    )
    text = command(folder, tmp_path / "v", "vllm", measurement=str(path))
    assert json.loads(shlex.split(text)[-1])["num_speculative_tokens"] == expected
    card = (tmp_path / "v" / "README.md").read_text()
    assert f"{values['acceptance']['greedy_draft_acceptance']['value']:.3f}" in card
    assert values["verdict"]["reason"] in card


def test_drafts_that_were_measured_otherwise_than_they_are_served_are_refused(
    folder: Path, tmp_path: Path
):
    sampled = measured(folder, tmp_path / "sampled.json", None)
    greedy = measured(folder, tmp_path / "greedy.json", 0.0)
    with pytest.raises(UsageError, match="add --draft-temperature 0"):
        command(folder, tmp_path / "l", "llamacpp", measurement=str(sampled))
    with pytest.raises(UsageError, match="add --draft-temperature 1"):
        command(folder, tmp_path / "t", "transformers", measurement=str(greedy))
    vllm = [
        json.loads(shlex.split(command(folder, tmp_path / name, "vllm", measurement=str(path)))[-1])
        for name, path in (("s", sampled), ("g", greedy))
    ]
    assert [one["draft_sample_method"] for one in vllm] == ["probabilistic", "greedy"]


def test_vllm_draws_drafts_without_the_requests_top_k(folder: Path, tmp_path: Path):
    path = measured(folder, tmp_path / "m.json", None, sampling={"temperature": 1.0, "top_k": 5})
    with pytest.raises(UsageError, match=r"without top-k and top-p.*--draft-temperature 1"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))


def test_a_measurement_of_another_draft_is_refused(folder: Path, tmp_path: Path):
    path = measured(folder, tmp_path / "m.json", 0.0, draft=str(folder / "target"))
    with pytest.raises(ConfigError, match="was measured with the draft"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not what `paceline measure --json` writes"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))


def test_a_path_that_vllm_takes_for_another_method_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="'eagle3'"):
        command(folder, tmp_path / "my-Eagle3", "vllm")
