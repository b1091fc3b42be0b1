"""Benches that are parts of one measurement: other examples, or other models on one machine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchConfig, bench
from paceline.bench.answers import key_of, read_texts
from paceline.core.sampling import SamplingParams
from paceline.data.tokens import encode
from paceline.decode import AutoregressiveDecoder
from paceline.errors import ConfigError, ContextLengthError, UsageError
from paceline.models import load_model
from support.runs import bench_config, write_pair

pytestmark = pytest.mark.slow


def settings(folder: Path, output: Path, temperature: float, **changes: Any) -> BenchConfig:
    rules = [{"rule": "lossless"}]
    grid = {"temperatures": [temperature], "num_speculative_tokens": [2], "rules": rules}
    return bench_config(folder, output, grid, **{"num_examples": 4} | changes)


def test_a_skipped_example_leaves_the_others_their_seeds(folder: Path, tmp_path: Path):
    """The second part of the examples, answered alone, has the answers that it has in the whole."""
    whole = bench(settings(folder, tmp_path / "whole", 1.0)).rows
    part = settings(folder, tmp_path / "part", 1.0, num_examples=2, skip_examples=2)
    rows = bench(part).rows
    known = read_texts(tmp_path / "whole") | read_texts(tmp_path / "part")
    for one, other in zip(whole, rows, strict=True):
        assert (one.units, other.units) == ((0, 1, 2, 3), (2, 3))
        texts = [known[key_of(row)] for row in (one, other)]
        assert texts[0][2:] == texts[1]
        assert texts[0][:2] != texts[1]


def test_a_reference_is_timed_alone_by_turns_with_the_others(folder: Path, tmp_path: Path):
    changes = {"num_examples": 3, "draft": str(folder / "target")}
    plain = bench(settings(folder, tmp_path / "plain", 0.0, **changes)).rows
    made = settings(folder, tmp_path / "out", 0.0, reference=str(folder / "draft"), **changes)
    rows = bench(made).rows
    draft = load_model(folder / "draft", dtype="float32")
    assert draft.tokenizer is not None
    examples = made.task.examples("test", 3)
    prompts = [encode(example.record, draft.tokenizer)[0] for example in examples]
    decoder = AutoregressiveDecoder(draft, SamplingParams(temperature=0))
    texts = read_texts(tmp_path / "plain") | read_texts(tmp_path / "out")
    counts = [len(decoder.generate([prompt], 9, seed=[0])[0].tokens) for prompt in prompts]
    for row, other in zip(rows, plain, strict=True):
        assert key_of(row) != key_of(other)
        assert not any(name.startswith("reference") for name in other.sums)
        assert texts[key_of(row)] == texts[key_of(other)]
        timed = [seconds is not None for seconds in row.sums["target_seconds"]]
        assert row.sums["reference_tokens"] == tuple(
            count if is_timed else None for count, is_timed in zip(counts, timed, strict=True)
        )
        assert [bool(seconds) for seconds in row.sums["reference_seconds"]] == timed


def test_a_reference_whose_context_cuts_its_texts_is_one_line(folder: Path, tmp_path: Path):
    """Its seconds would be those of fewer tokens."""
    short = shutil.copytree(folder / "draft", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    made = settings(folder, tmp_path / "out", 0.0, reference=str(short), max_new_tokens=15)
    with pytest.raises(ContextLengthError, match="max_new_tokens is 15, but the context holds 16"):
        bench(made)


def test_a_reference_with_another_tokenizer_is_one_line(folder: Path, tmp_path: Path):
    other = write_pair(tmp_path / "other", architecture="t5_v1_1") / "target"
    made = settings(folder, tmp_path / "out", 0.0, reference=str(other))
    with pytest.raises(UsageError, match="has another tokenizer or is of another"):
        bench(made)


def test_an_engine_has_no_reference(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="an engine serves one target; leave reference out"):
        settings(folder, tmp_path, 1.0, reference="other", engine={"engine": "vllm"})
