"""What a draft is worth on recorded texts, by counting blocks of texts that transformers scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.data.distillation_data import generate_data
from paceline.follow.config import FollowConfig
from paceline.follow.judge import Judge, Trial
from support.runs import write_corpus, write_pair

GAMMA, NEW = 3, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pair(tmp_path_factory.mktemp("judged"))
    asked = [{"prompt": f"the {number} ran", "id": f"p{number}"} for number in range(12)]
    write_corpus(folder / "prompts.jsonl", asked)
    return folder


def config(folder: Path, **changes: Any) -> FollowConfig:
    values = {
        **{name: str(folder / name) for name in ("target", "draft")},
        "log": str(folder / "prompts.jsonl"),
        "output": folder / "out",
        "align": {"num_steps": 1},
        "judging": {"num_speculative_tokens": GAMMA},
        "num_answers": 8,
        "max_prompt_tokens": 16,
        "max_new_tokens": NEW,
    }
    return FollowConfig(**values | changes)


def judged(folder: Path, name: str, **changes: Any) -> Judge:
    found = config(folder, **changes)
    made = found.generate_config(folder / "prompts.jsonl", folder / name, 1)
    generate_data(made, resume=True)
    return Judge(found, folder / name / "data")


def plain_log_probs(path: Path, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


def simulated_blocks(survival: np.ndarray, ends: bool, draws: int = 4000) -> float:
    """Mean blocks of a text whose tokens behind the first survive with these probabilities."""
    rng, total = np.random.default_rng(1), 0
    for _ in range(draws):
        at = 0
        while at < len(survival):
            total += 1
            left = NEW - 1 - at
            for place in range(min(GAMMA, left - 1) + 1):
                drafted = place < min(GAMMA, left - 1)
                accepted = drafted and at < len(survival) and rng.random() < survival[at]
                at += 1
                if not accepted or (ends and at == len(survival)):
                    break
    return total / draws


def test_blocks_are_those_of_a_simulation_with_plain_transformers(folder: Path):
    """Each of 12 texts within 5 standard errors of 4,000 draws: below 1e-5 for any of them."""
    judge = judged(folder, "states")
    calls = judge.calls(folder / "draft")
    # the order of texts is the evaluator's: shortest first
    rows = sorted(judge.rows, key=lambda row: len(row.tokens))
    expected: list[float] = []
    for row in rows:
        tokens, first = list(row.tokens), row.trained_from
        p, q = (plain_log_probs(folder / name, tokens) for name in ("target", "draft"))
        places = range(first, len(tokens) - 1)  # of what the model reads before the second token on
        ratios = [float((q[at, tokens[at + 1]] - p[at, tokens[at + 1]]).exp()) for at in places]
        ends = len(tokens) - first < NEW
        expected.append(simulated_blocks(np.minimum(ratios, 1), ends))
    assert calls.blocks_N.tolist() == pytest.approx(expected, abs=5 * 1.6 / 4000**0.5)


def test_log_probabilities_of_all_tokens_say_what_states_say(folder: Path):
    states = judged(folder, "states").calls(folder / "draft")
    writer = {"kind": "model", "top_logprobs": 266, "hidden_states": False}
    logs = judged(folder, "logs", writer=writer).calls(folder / "draft")
    # hidden states are rounded to bfloat16
    assert sorted(logs.blocks_N.tolist()) == pytest.approx(sorted(states.blocks_N.tolist()), 0.02)


def test_few_log_probabilities_count_no_fewer_blocks(folder: Path):
    """A token that is not among them gets at least its probability, and so survives less often."""
    judges = {n: judged(folder, f"logs-{n}", writer={"top_logprobs": n}) for n in (266, 3)}
    found = {count: judge.calls(folder / "draft") for count, judge in judges.items()}
    assert (found[3].blocks_N >= found[266].blocks_N - 1e-6).all()
    assert found[3].blocks_N.sum() > found[266].blocks_N.sum()


def test_the_target_as_its_own_draft_is_always_accepted(folder: Path):
    calls = judged(folder, "states").calls(folder / "target")
    assert calls.accepted_share > 0.98
    assert json.loads(Trial(draft="a", number=1).model_dump_json())["rounds"] == 0
