"""Held-out text taken out of the training text."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompts import Record
from paceline.errors import ConfigError
from paceline.models.loading import load_tokenizer
from paceline.records import read_jsonl
from paceline.train import align
from paceline.train.align import records_of
from support.runs import align_config, losses, write_corpus

TEXTS = [f"the {word} sat there" for word in ("cat", "hen", "man", "hat", "pan", "tin")]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_corpus(folder / "corpus.jsonl", [{"text": text} for text in [*TEXTS, *TEXTS]])
    return folder


def changes(folder: Path, count: int, train: str = "corpus.jsonl", **more: Any) -> dict[str, Any]:
    data = {"train": str(folder / train), "held_out_from_train": count}
    small = {"max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    return {"data": data, "evaluation": small} | more


def test_what_is_held_out_is_not_trained_on_duplicates_included(folder: Path, tmp_path: Path):
    splits = set()
    for seed in range(8):
        config = align_config(folder, tmp_path / "run", **changes(folder, 2, seed=seed))
        train, held_out = records_of(config)
        assert held_out is not None
        trained, judged = [record.text for record in train], [record.text for record in held_out]
        assert len(set(judged)) == 2
        assert sorted(trained) == sorted(2 * list(set(TEXTS) - set(judged)))
        assert records_of(config) == (train, held_out), "a run that is resumed holds out the same"
        splits.add(frozenset(judged))
    assert len(splits) > 1


@pytest.mark.parametrize("kind", ["prompt", "chat", "tokens"])
def test_no_other_answer_to_a_prompt_that_is_held_out_is_trained_on(
    folder: Path, tmp_path: Path, kind: str
):
    """The form of generate-data with `num_per_prompt`, and of preference data."""
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(TEXTS[:4]):
        for answer in range(3):
            asked = {"role": "user", "content": text}
            given = {"role": "assistant", "content": f"{answer}"}
            exact = {"prompt_tokens": [index, 7], "completion_tokens": [answer, 1]}
            forms = {
                "prompt": {"prompt": text, "completion": f"{answer}"},
                "chat": {"messages": [asked, given]},
                "tokens": exact | {"stop_reason": "eos"},
            }
            rows.append(forms[kind] | {"id": f"{text}/{answer}"})
    write_corpus(folder / f"{kind}s.jsonl", rows)

    def prompt_of(record: Record) -> str:
        return str(record.id).partition("/")[0]

    for seed in range(4):
        made = changes(folder, 2, f"{kind}s.jsonl", seed=seed)
        train, held_out = records_of(align_config(folder, tmp_path / "run", **made))
        trained, judged = map(prompt_of, train), [prompt_of(record) for record in held_out or ()]
        assert len(judged) == len(set(judged)) == 2
        assert sorted(trained) == sorted(3 * list(set(TEXTS[:4]) - set(judged)))


def test_a_run_without_held_out_prompts_is_judged_by_its_own_text(folder: Path, tmp_path: Path):
    config = align_config(folder, tmp_path / "run", **changes(folder, 2))
    run = align(config)
    _, held_out = records_of(config)
    tokenizer = load_tokenizer(folder / "target")
    wanted = [tokenizer(record.text)["input_ids"][:4] for record in held_out or ()]
    assert [row["prompt"] for row in read_jsonl(run / "held_out.jsonl")] == wanted
    result = json.loads((run / "result.json").read_text())
    for when in ("before", "after"):
        for name in ("expected_acceptance", "greedy_agreement"):
            figures = result[when]
            assert figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]
    assert len(losses(run)) == 10


def test_only_prompts_that_are_evaluated_are_tokenised(folder: Path, tmp_path: Path):
    """A warning, which is an error here, would count those that are too long."""
    rows = [{"prompt": text} for text in ("a", "the", *TEXTS)]
    path = write_corpus(tmp_path / "prompts.jsonl", rows)
    data = {"train": str(folder / "corpus.jsonl"), "held_out": str(path)}
    small = {"num_prompts": 2, "max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    run = align(align_config(folder, tmp_path / "run", data=data, evaluation=small, num_steps=1))
    tokenizer = load_tokenizer(folder / "target")
    wanted = [tokenizer(row["prompt"])["input_ids"] for row in rows[:2]]
    assert [row["prompt"] for row in read_jsonl(run / "held_out.jsonl")] == wanted


def test_holding_out_everything_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is 6, but .* has 6 different prompts; hold out fewer"):
        align(align_config(folder, tmp_path / "run", **changes(folder, 6)))
    both = {"data": changes(folder, 2)["data"] | {"held_out": str(folder / "corpus.jsonl")}}
    with pytest.raises(ConfigError, match="got both held_out and held_out_from_train; remove one"):
        align_config(folder, tmp_path / "run", **both)
