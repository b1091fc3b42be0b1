"""Settings that a server may take from its model: a request has neutral values of all of them."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.data.answering import ShardStore
from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.errors import UsageError
from support.engines import Answer, Served, serving
from support.runs import write_corpus


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_corpus(folder / "prompts.jsonl", [{"prompt": f"the {x}"} for x in ("cat", "hat")] * 4)
    return folder


def config(folder: Path, output: Path, url: str) -> GenerateDataConfig:
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "writer": {"kind": "openai", "url": url, "concurrency": 3, "patience_s": 0.3},
        "output": str(output / "run"),
        "prompts": str(folder / "prompts.jsonl"),
        "temperatures": [1],
        "max_new_tokens": 4,
    }
    return validate(GenerateDataConfig, values)


OPENAI = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logprobs"),
    *("presence_penalty", "frequency_penalty"),
}


class Strict(Served):
    """A server that refuses other keys than these, and values of top_k below `least`."""

    def __init__(self, folder: Path, known: set[str], least: int) -> None:
        super().__init__(folder, kind="other")
        self.known, self.least, self.num_refused = OPENAI | known, least, 0

    def complete(self, body: dict[str, Any]) -> Answer:
        if body.keys() - self.known or body.get("top_k", self.least) < self.least:
            self.num_refused += 1
            return 422, {"detail": "Extra inputs are not permitted"}
        return super().complete(body)


@pytest.mark.parametrize(
    ("known", "least", "wanted"),
    [
        ({"top_k", "min_p", "repetition_penalty"}, -1, {"top_k": -1, "min_p": 0}),
        ({"top_k", "min_p", "repetition_penalty", "repeat_penalty"}, 0, {"repeat_penalty": 1}),
        (set(), 0, {}),
    ],
)
def test_servers_get_neutral_settings_in_a_form_that_they_accept(
    folder: Path, tmp_path: Path, known: set[str], least: int, wanted: dict[str, Any]
):
    served = Strict(folder, known, least)
    with serving(served.routes) as url, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = generate_data(config(folder, tmp_path, url))
    assert len(ShardStore(run / "data").read()) == len(served.bodies) == 8
    for body in served.bodies:
        assert body["presence_penalty"] == body["frequency_penalty"] == 0
        assert body.keys() - OPENAI == known
        assert wanted.items() <= body.items()
    said = [str(each.message) for each in heard if "refuses top_k" in str(each.message)]
    assert len(said) == (0 if known else 1)
    assert served.num_refused <= 2 * 3  # of the requests in flight at first


def test_a_request_that_is_refused_for_another_reason_is_that_error(folder: Path, tmp_path: Path):
    served = Served(folder, kind="other")
    served.faults = [(400, {"error": {"message": "the prompt is too long"}})] * 99
    with serving(served.routes) as url, pytest.raises(UsageError, match="the prompt is too long"):
        generate_data(config(folder, tmp_path, url))
