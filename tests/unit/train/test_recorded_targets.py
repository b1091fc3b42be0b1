"""Alignment from recorded log-probabilities: a target of which only the tokenizer is here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.prompts import read_records
from paceline.errors import ConfigError, PromptError, UsageError, VocabularyMismatchError
from paceline.models import load_model
from paceline.models.drafts.save import save_draft
from paceline.train import align
from support.data import WORDS, write_lines
from support.engines import top_of
from support.models import limit_vocabulary, tiny_model
from support.runs import align_config, losses


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A pair; `answers.jsonl` has texts with log-probabilities of all tokens, `few.jsonl` of 4.

    `limited` is a draft that proposes 40 tokens.
    """
    target = load_model(folder / "target", dtype="float32")
    tokenizer: Any = target.tokenizer
    for name, count in (("answers", target.vocab_size), ("few", 4)):
        rows = []
        for index, word in enumerate(WORDS[:8]):
            prompt = tokenizer(f"the {word}")["input_ids"]
            completion = tokenizer(f" and {word} then" * (1 + index % 3))["input_ids"][:20]
            rows.append(row_of(target, prompt, completion, count))
        write_lines(folder / f"{name}.jsonl", *rows)
    (folder / "tokenizer").mkdir()
    tokenizer.save_pretrained(folder / "tokenizer")
    draft = load_model(folder / "draft", dtype="float32")
    limited = limit_vocabulary(draft, target, [[5, 6, 7]], 40)
    save_draft(limited, folder / "draft", folder / "limited", torch.float32)
    return folder


def row_of(target: Any, prompt: list[int], completion: list[int], count: int) -> dict[str, Any]:
    values, tokens = top_of(target, prompt, completion, count)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "stop_reason": "length",
        "top_tokens": tokens.tolist(),
        "top_log_probs": values.tolist(),
    }


def run(folder: Path, output: Path, name: str, **changes: Any) -> Path:
    given = {"data": {"train": str(folder / f"{name}.jsonl")}, "max_completion_tokens": 30}
    return align(align_config(folder, output, **given | {"max_prompt_tokens": 12} | changes))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "tvd", "jsd"])
def test_all_recorded_tokens_train_as_the_target_itself(
    folder: Path, tmp_path: Path, divergence: str
):
    term = {"kind": "top_k_tail", "divergence": divergence}
    wanted = losses(run(folder, tmp_path / "loaded", "answers", objective=divergence))
    alone = {"target": str(folder / "tokenizer"), "objective": term}
    found = losses(run(folder, tmp_path / "recorded", "answers", **alone))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert wanted[-1] < wanted[0]


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd", "negative_log_acceptance"])
def test_a_draft_of_few_tokens_trains_as_with_the_target_itself(
    folder: Path, tmp_path: Path, divergence: str
):
    """Recorded tokens that it does not propose count as they do with the target."""
    term = {"kind": "top_k_tail", "divergence": divergence}
    limited: dict[str, Any] = {"draft": str(folder / "limited"), "num_steps": 6}
    wanted = run(folder, tmp_path / "loaded", "answers", objective=divergence, **limited)
    alone = {"target": str(folder / "tokenizer"), "objective": term}
    found = losses(run(folder, tmp_path / "recorded", "answers", **alone, **limited))
    assert found == pytest.approx(losses(wanted), rel=1e-4, abs=1e-5)
    limited["num_steps"] = 1
    (shorter,) = losses(run(folder, tmp_path / "shorter", "few", **alone, **limited))
    assert shorter < found[0]


def test_what_was_not_recorded_is_one_line(folder: Path, tmp_path: Path):
    evaluated = {"data": {"train": str(folder / "few.jsonl"), "held_out_from_train": 2}}

    def refused(kind: type[Exception], match: str, name: str, **changes: Any) -> None:
        settings = {"objective": "top_k_tail", "target": str(folder / "tokenizer")} | changes
        with pytest.raises(kind, match=match):
            run(folder, tmp_path / "run", name, **settings)

    write_lines(folder / "plain.jsonl", {"prompt": "the", "completion": "cat"})
    refused(PromptError, r"plain.jsonl line 1 has no top_tokens; record them by gen", "plain")
    refused(ConfigError, "set fixed_fraction to 1", "few", fixed_fraction=0.5, draft_fraction=1.0)
    # evaluation needs the target itself
    refused(UsageError, "config.json", "few", **evaluated)


def test_records_without_a_stop_reason_are_their_own_tokens_alone(folder: Path, tmp_path: Path):
    rows = [json.loads(line) for line in (folder / "few.jsonl").read_text().splitlines()]
    for row in rows:
        del row["stop_reason"]
    path = write_lines(tmp_path / "bare.jsonl", *rows)
    alone = {"target": str(folder / "tokenizer"), "objective": "top_k_tail", "num_steps": 4}
    found = run(folder, tmp_path / "run", "few", data={"train": str(path)}, **alone)
    assert losses(found) == losses(run(folder, tmp_path / "named", "few", **alone))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_tokens": [[1]]}, "line 1 has 3 completion tokens, and top_tokens and top_log"),
        ({"top_log_probs": None}, "of unequal lengths; record them again"),
    ],
)
def test_damaged_records_are_one_line(tmp_path: Path, change: dict[str, Any], match: str):
    row = {"prompt_tokens": [5], "completion_tokens": [5, 6, 7], "stop_reason": "length"}
    row |= {"top_tokens": [[1], [2], [3]], "top_log_probs": [[-1.0], [-1.0], [-1.0]]}
    path = write_lines(tmp_path / "rows.jsonl", row | change)
    with pytest.raises(PromptError, match=match):
        read_records(path)


def test_another_tokenizer_is_one_line(folder: Path, tmp_path: Path):
    other: Any = tiny_model("llama").tokenizer or load_model(folder / "draft").tokenizer
    other.add_tokens(["a token of its own"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(VocabularyMismatchError, match=r"'a token of its own' is token .* missing"):
        run(folder, tmp_path / "run", "few", target=str(tmp_path / "other"), objective="top_k_tail")


def test_a_token_beyond_the_last_logit_is_no_difference(folder: Path, tmp_path: Path):
    """As the padding token that copies of Llama 2 add to their tokenizer alone."""
    shutil.copytree(folder / "draft", tmp_path / "draft")
    longer: Any = load_model(folder / "draft").tokenizer
    longer.add_tokens(["<more>"])
    for name in ("draft", "target"):
        longer.save_pretrained(tmp_path / name)
    pair = {name: str(tmp_path / name) for name in ("draft", "target")}
    settings = {"objective": "top_k_tail", "num_steps": 3}
    found = run(folder, tmp_path / "run", "answers", **settings, **pair)
    plain = {"target": str(folder / "tokenizer")} | settings
    assert losses(found) == losses(run(folder, tmp_path / "plain", "answers", **plain))
