"""What a draft is worth on recorded texts, by counting blocks of texts that transformers scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.data.distillation_data import generate_data
from paceline.errors import ConfigError
from paceline.follow.config import FollowConfig
from paceline.follow.judge import Judge
from paceline.models import load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.results import FIGURES
from support.data import write_lines
from support.runs import write_pair

GAMMA, NEW = 3, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pair(tmp_path_factory.mktemp("judged"))
    asked = [{"prompt": f"the {number} ran", "id": f"p{number}"} for number in range(12)]
    write_lines(folder / "prompts.jsonl", *asked)
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


def plain_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0].float()


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


def expected_blocks(judge: Judge, folder: Path, *, greedy: bool) -> list[float]:
    """Of each text, shortest first, by transformers' own passes."""
    found: list[float] = []
    for row in sorted(judge.rows, key=lambda row: len(row.tokens)):
        tokens, first = list(row.tokens), row.trained_from
        p, q = (plain_logits(folder / name, tokens) for name in ("target", "draft"))
        survival: list[float] = []
        for at in range(first, len(tokens) - 1):
            token = tokens[at + 1]
            ratio = float((q.log_softmax(-1) - p.log_softmax(-1))[at, token].exp())
            same = float(q[at].argmax() == token)
            survival.append(same if greedy else min(ratio, 1.0))
        found.append(simulated_blocks(np.array(survival), len(tokens) - first < NEW))
    return found


@pytest.mark.parametrize("to", ["vllm", "transformers"])
def test_blocks_are_those_of_a_simulation_with_plain_transformers(folder: Path, to: str):
    """Greedy drafts are exact; sampled ones within 5 standard errors of 4,000 draws (1e-5)."""
    judge = judged(folder, "states", serving={"to": to})
    expected = expected_blocks(judge, folder, greedy=to == "vllm")
    error = 0.01 if to == "vllm" else 5 * 1.6 / 4000**0.5
    found = judge.row(folder / "draft", "draft")
    assert found.sums["calls"] == pytest.approx(expected, abs=error)


def test_a_draft_is_judged_without_its_list_which_engines_ignore(folder: Path):
    draft = load_model(folder / "draft")
    limited = wrap_model(draft.hf, draft.tokenizer, torch.tensor([1, 5, 9, 77, 140]))
    save_draft(limited, folder / "target", folder / "limited")
    judge = judged(folder, "states")
    found, wanted = (judge.row(folder / name, "draft") for name in ("limited", "draft"))
    assert found.sums == wanted.sums


def test_texts_alone_say_of_greedy_drafts_what_states_say(folder: Path):
    states = judged(folder, "states").row(folder / "draft", "draft")
    alone = judged(folder, "logs", writer={"top_logprobs": 2}).row(folder / "draft", "draft")
    assert sorted(alone.sums["calls"]) == pytest.approx(sorted(states.sums["calls"]))


def test_texts_alone_are_not_enough_where_drafts_are_sampled(folder: Path):
    with pytest.raises(ConfigError, match=r"judged by writer\.hidden_states alone"):
        config(folder, writer={"top_logprobs": 2}, serving={"to": "transformers"})


def test_the_target_as_its_own_sampled_draft_is_always_accepted(folder: Path):
    judge = judged(folder, "states", serving={"to": "transformers"})
    assert FIGURES["draft_acceptance_rate"].value(judge.row(folder / "target", "target")) > 0.98
