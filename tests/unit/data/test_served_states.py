"""generate-data with the hidden states that a vLLM writes into files: a server on transformers."""

import fcntl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file

from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.models import load_model
from support.data import answers, generation
from support.engines import Answer, Served, serving
from support.models import tiny_hf

if TYPE_CHECKING:
    from collections.abc import Callable


class ServedStates(Served):
    """Writes states of the prompt and of all new tokens but the last, as vLLM's connector does.

    `change`: what it does to the tensors of a file.
    """

    def __init__(self, folder: Path, states: Path) -> None:
        super().__init__(folder)
        self.states = states
        self.named = states
        self.change: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: tensors
        self.hf: Any = load_model(folder / "target", dtype="float32").hf
        self.before: list[torch.Tensor] = []
        norm = self.hf.model.norm
        norm.register_forward_pre_hook(lambda _, given: self.before.append(given[0]))

    def complete(self, body: dict[str, Any]) -> Answer:
        status, answer = super().complete(body)
        if "kv_transfer_params" not in body:
            return status, answer
        assert body["kv_transfer_params"] == {"include_output_tokens": True}
        read = [*body["prompt"], *answer["choices"][0]["token_ids"][:-1]]
        with self.lock, torch.inference_mode():
            self.before.clear()
            self.hf(torch.tensor([read]))
            tensors = {"hidden_states": self.before[0][0][:, None].clone()}
            tensors = self.change(tensors | {"token_ids": torch.tensor(read)})
        name = f"{uuid4()}.safetensors"
        path, lock = self.states / name, self.states / f"{name}.lock"
        held = lock.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(0.02)  # the answer is there before the file is whole
            with held:
                if isinstance(tensors, bytes):
                    path.write_bytes(tensors)
                elif tensors is not None:
                    save_file(tensors, path)

        threading.Thread(target=write).start()
        named = {"hidden_states_path": str(self.named / name)}
        return status, answer | {"kv_transfer_params": named}


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> ServedStates:
    (tmp_path / "states").mkdir()
    return ServedStates(folder, tmp_path / "states")


def config(folder: Path, output: Path, url: str, **changes: Any) -> GenerateDataConfig:
    writer = {"kind": "openai", "url": url, "concurrency": 3, "patience_s": 0.3}
    writer |= {"hidden_states": True, "states_directory": str(output.parent / "states")}
    writer |= changes.pop("writer", {})
    return generation(folder, output, **changes, writer=writer)


def test_the_states_are_those_that_a_loaded_target_records(
    folder: Path, tmp_path: Path, served: ServedStates
):
    with serving(served.routes) as url:
        found = answers(generate_data(config(folder, tmp_path / "run", url)))
    assert len(found) == 22
    model = load_model(folder / "target", dtype="float32")
    for answer in found:
        text = [*answer.prompt_tokens, *answer.completion_tokens]
        with torch.inference_mode():
            hidden_TD = model.hidden(model.trial_batch(text))[0]
        wanted = hidden_TD[len(answer.prompt_tokens) - 1 : -1]
        assert answer.hidden_states is not None
        raw = torch.frombuffer(bytearray(answer.hidden_states), dtype=torch.bfloat16)
        torch.testing.assert_close(raw.view_as(wanted).float(), wanted, rtol=1e-2, atol=1e-2)
    assert list(served.states.iterdir()) == []


def test_files_are_read_and_removed_in_the_named_directory_alone(
    folder: Path, tmp_path: Path, served: ServedStates
):
    few = {"path": str(folder / "prompts.jsonl"), "limit": 2}
    served.named = Path("/server/states")  # as the server sees them
    with serving(served.routes) as url:
        made = config(folder, tmp_path / "run", url, prompts=few)
        assert len(answers(generate_data(made))) == 4
        kept = tmp_path / "kept"
        kept.mkdir()
        served.states = served.named = kept
        other = config(folder, tmp_path / "other", url, prompts=few)
        with pytest.raises(PacelineError, match=r"states does not have them; give .*states_direct"):
            generate_data(other)
        assert any(kept.iterdir())
    with pytest.raises(ConfigError, match="hidden_states needs states_directory"):
        config(folder, tmp_path / "third", "http://127.0.0.1:1", writer={"states_directory": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "does not have them"),
        (lambda _: b"{", "wrote damaged hidden states to .*safetensors"),
        (lambda found: found | {"token_ids": found["token_ids"] + 1}, "states of other tokens"),
        (lambda found: {"token_ids": found["token_ids"]}, "states of other tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_asked_for_again_and_then_one_line(
    folder: Path, tmp_path: Path, served: ServedStates, change: Any, message: str
):
    served.change = change
    with serving(served.routes) as url, pytest.raises(PacelineError, match=message):
        generate_data(config(folder, tmp_path / "run", url))


def test_a_damaged_file_is_asked_for_again(folder: Path, tmp_path: Path, served: ServedStates):
    damaged = iter([True, True])
    served.change = lambda found: b"{" if next(damaged, False) else found
    with serving(served.routes) as url:
        found = answers(generate_data(config(folder, tmp_path / "run", url)))
    assert len(found) == 22
    assert len(served.bodies) == 24
    assert all(answer.hidden_states for answer in found)


def test_a_server_without_the_connector_and_another_model_are_one_line(
    folder: Path, tmp_path: Path, served: ServedStates
):
    plain = Served(folder)
    with serving(plain.routes) as url, pytest.raises(UsageError, match="--kv-transfer-config"):
        generate_data(config(folder, tmp_path / "run", url))
    wide = tmp_path / "wide"
    tiny_hf("llama", hidden_size=48, vocab_size=len(served.tokens_of)).save_pretrained(wide)
    served.tokens_of.save_pretrained(wide)
    with (
        serving(served.routes) as url,
        pytest.raises(
            UsageError, match=r"of 32 values, but the head of .*wide reads 48; set target"
        ),
    ):
        generate_data(config(folder, tmp_path / "other", url, target=str(wide)))
