"""Training of encoder-decoders: which code computes hidden states, and labels that are banned."""

from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.records import read_jsonl
from paceline.train import align, pretrain
from paceline.train.pretrain import PretrainConfig
from support.runs import align_config, losses, write_corpus, write_pair

_PAIRS = [{"prompt": "the rain", "completion": f"an inn and {word}"} for word in ("tin", "hen")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_pair(tmp_path / "pair", architecture="t5_v1_1")
    write_corpus(folder / "corpus.jsonl", _PAIRS * 4)
    return folder


def pretrain_config(folder: Path, output: Path) -> PretrainConfig:
    corpus = str(folder / "corpus.jsonl")
    values: dict[str, Any] = {
        "model": str(folder / "draft"),
        "data": {"train": corpus, "held_out": corpus},
        "output": str(output),
        "num_steps": 2,
        "batch_size": 4,
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "precision": "float32",
        "device": "cpu",
    }
    return validate(PretrainConfig, values)


@pytest.mark.parametrize("command", ["align", "pretrain"])
def test_a_label_that_the_model_may_not_emit_is_trained_as_before(
    folder: Path, tmp_path: Path, command: str
):
    """Its logit is -1e4 elsewhere: the loss would be 1e4, and would never fall."""

    def run(name: str) -> list[float]:
        if command == "pretrain":
            made = pretrain(pretrain_config(folder, tmp_path / name))
            rows = read_jsonl(made / "metrics.jsonl")
            return [value for row in rows for key, value in row.items() if key.endswith("loss")]
        settings = {"objective": "cross_entropy", "num_steps": 2}
        return losses(align(align_config(folder, tmp_path / name, **settings)))

    plain = run("plain")
    for name in ("draft", "target"):
        path = folder / name / "generation_config.json"
        bad = [[token] for token in range(3, 200)]
        path.write_text(path.read_text().replace("{", f'{{"bad_words_ids": {bad},', 1))
    assert max(plain) < 100
    assert run("banned") == plain
