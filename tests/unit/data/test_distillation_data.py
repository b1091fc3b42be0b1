"""generate-data on tiny models: each text the target writes is written once, whatever happens."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyarrow import parquet

from paceline import processes
from paceline.core.sampling import SamplingParams
from paceline.data.answering import ShardStore
from paceline.data.distillation_data import generate_data, planned
from paceline.data.examples import Lengths, build_examples
from paceline.data.input_checks import InputChecks
from paceline.data.prompts import read_records
from paceline.data.requests import GenerateDataConfig
from paceline.decode import AutoregressiveDecoder
from paceline.environment import begin
from paceline.errors import ConfigError, ContextLengthError, GenerationError, ModelLoadError
from paceline.models import load_model
from paceline.models.loading import load_tokenizer
from support.data import WORDS, answers, generation, write_lines
from support.runs import write_pair


def config(folder: Path, output: Path, **changes: Any) -> GenerateDataConfig:
    exact = {"batch_size": 3, "activations": "float32", "dtype": "float32"}
    return generation(folder, output, **exact | changes)


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `config`."""
    return generate_data(config(folder, tmp_path_factory.mktemp("written") / "run"))


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy of it, in tmp_path."""
    return shutil.copytree(written, tmp_path / "run")


def test_records_are_what_the_target_writes_with_the_seed_that_they_name(
    folder: Path, written: Path
):
    found = answers(written)
    assert len(found) == 22
    assert {answer.id for answer in found} == {f"{i}/{j}" for i in range(11) for j in range(2)}
    target = load_model(folder / "target", dtype="float32")
    assert target.tokenizer is not None
    for answer in found:
        sampling = SamplingParams(temperature=answer.temperature, top_p=0.95)
        (alone,) = AutoregressiveDecoder(target, sampling).generate(
            [answer.prompt_tokens], 12, [answer.seed]
        )
        assert answer.completion_tokens == alone.tokens
        assert answer.stop_reason == alone.stop_reason
        assert answer.prompt == f"the {WORDS[int(answer.id.partition('/')[0])]}"
        ended = answer.stop_reason == "eos"
        kept = alone.tokens[:-1] if ended else alone.tokens
        assert answer.completion == target.tokenizer.decode(kept)
    result = json.loads((written / "result.json").read_text())
    assert result["num_records"] == 22
    assert result["num_tokens"] == sum(len(answer.completion_tokens) for answer in found)
    assert result["temperatures"] == {"0": 11, "1": 11}


def test_a_dry_run_says_texts_tokens_and_bytes(folder: Path, tmp_path: Path, written: Path):
    num_read = sum(len(answer.prompt_tokens) for answer in answers(written))
    width = load_model(folder / "target").head_weight.shape[1]
    writer = {"kind": "model", "top_logprobs": 3, "hidden_states": True}
    num_bytes = (num_read + 264) * 12 + 264 * (3 * 8 + 2 * width)  # 264: 22 answers of 12 tokens
    assert planned(config(folder, tmp_path / "run", writer=writer)) == (
        f"run: 22 answers to prompts of {num_read} tokens, at most 264 new tokens and about "
        f"{num_bytes / 1e3:.1f} kB"
    )
    assert not (tmp_path / "run").exists()


def test_tokens_are_counted_without_reading_the_hidden_states(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read, columns = set[str](), ShardStore.columns

    def note(store: ShardStore, name: str, *names: str) -> Any:
        read.update(names)
        return columns(store, name, *names)

    monkeypatch.setattr(ShardStore, "columns", note)
    writer = {"kind": "model", "hidden_states": True}
    run = generate_data(config(folder, tmp_path / "run", writer=writer))
    result = json.loads((run / "result.json").read_text())
    table = parquet.read_table(run / "data")
    completions = table["completion_tokens"].to_pylist()
    assert result["num_tokens"] == sum(map(len, completions))
    assert sum(result["stop_reasons"].values()) == table.num_rows == 22
    assert "completion_tokens" in read
    assert "hidden_states" not in read


def test_files_that_are_missing_or_damaged_are_made_again_and_no_others(
    folder: Path, tmp_path: Path, run: Path
):
    made = config(folder, tmp_path / "run")
    whole, store = answers(run), ShardStore(run / "data")
    names = sorted(path.name for path in store.directory.glob("*.parquet"))
    for name, size in zip(names[1::2], (None, 0, 100), strict=True):
        file = store.directory / name
        file.unlink() if size is None else file.write_bytes(file.read_bytes()[:size])
    kept = {name: (store.directory / name).stat().st_mtime_ns for name in names[::2]}
    (store.directory / ".writing.x").mkdir()
    generate_data(made, resume=True)
    assert answers(run) == whole
    assert kept == {name: (store.directory / name).stat().st_mtime_ns for name in kept}
    assert not list(store.directory.glob(".*"))


def test_a_draft_only_changes_how_fast_it_goes(folder: Path, tmp_path: Path):
    plain, drafted = (
        answers(generate_data(config(folder, tmp_path / name, temperatures=[0], draft=draft)))
        for name, draft in (("plain", None), ("fast", str(folder / "draft")))
    )
    assert [a.completion_tokens for a in drafted] == [a.completion_tokens for a in plain]


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_workers_write_the_same_records_even_if_one_dies_or_all_do(
    folder: Path, tmp_path: Path, written: Path, several: bool
):
    """All when the first file has come in: idle, or about to be given a file."""
    killed: list[int | None] = []

    def kill(_stage: str, done: float, _total: float, _note: str = "") -> None:
        children = multiprocessing.active_children() if done else []
        for child in children[: 2 if several and done < 5 else int(not killed)]:
            child.kill()
            killed.append(child.pid)
            if several:
                child.join()

    made = config(folder, tmp_path / "two", workers=2)
    assert answers(generate_data(made, progress=kill)) == answers(written)
    assert killed


@pytest.mark.usefixtures("run")
def test_another_configuration_is_not_mixed_in(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="already holds a run; resume it"):
        config(folder, tmp_path / "run").check(InputChecks())  # of a dry run
    with pytest.raises(ConfigError, match="already holds a run; resume it"):
        generate_data(config(folder, tmp_path / "run"))
    with pytest.raises(ConfigError, match="holds a run with another max_new_tokens"):
        generate_data(config(folder, tmp_path / "run", max_new_tokens=9), resume=True)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        generate_data(config(folder, tmp_path / "else"))


def test_other_prompts_or_another_model_at_the_same_place_are_not_mixed_in(tmp_path: Path):
    folder = write_pair(tmp_path / "pair")
    rows = [{"prompt": f"the {word}"} for word in WORDS]
    write_lines(folder / "prompts.jsonl", *rows[:6])
    generate_data(config(folder, tmp_path / "run"))
    write_lines(folder / "prompts.jsonl", *rows)
    with pytest.raises(ConfigError, match="with another plan: files have changed"):
        generate_data(config(folder, tmp_path / "run"), resume=True)
    write_lines(folder / "prompts.jsonl", *rows[:6])
    generate_data(config(folder, tmp_path / "run"), resume=True)
    (folder / "draft").rename(folder / "gone")
    (folder / "target").rename(folder / "draft")
    (folder / "gone").rename(folder / "target")
    with pytest.raises(ConfigError, match="with another plan: files have changed"):
        generate_data(config(folder, tmp_path / "run"), resume=True)


def test_a_start_that_was_refused_has_not_begun(folder: Path, tmp_path: Path):
    with pytest.raises(ContextLengthError, match=r"max_prompt_tokens \+ max_new_tokens is 108"):
        generate_data(config(folder, tmp_path / "run", max_new_tokens=100))
    assert answers(generate_data(config(folder, tmp_path / "run")))


def die(*_arguments: Any) -> None:
    """A worker that cannot live."""
    os._exit(7)


@pytest.mark.slow
def test_a_file_whose_workers_always_die_ends_the_run_in_one_line(folder: Path, tmp_path: Path):
    with (
        patch.object(processes, "_begin", die),
        pytest.raises(GenerationError, match="processes died 3 times in a row"),
    ):
        generate_data(config(folder, tmp_path / "run", workers=2))


def test_what_a_worker_says_is_wrong_is_said_here(folder: Path, tmp_path: Path):
    missing = str(folder / "nothing")
    for workers in (1, 2):
        with pytest.raises(ModelLoadError, match="nothing"):
            generate_data(config(folder, tmp_path / f"{workers}", draft=missing, workers=workers))


def test_records_are_read_for_alignment_to_the_token(folder: Path, written: Path):
    found = {answer.id: answer for answer in answers(written)}
    records = read_records(written / "data")
    assert len(records) == len(found)
    tokenizer = load_tokenizer(folder / "target")
    for record in records:
        assert record.id is not None
        answer = found[record.id]
        assert (record.text, record.completion) == (
            answer.prompt_tokens,
            answer.completion_tokens,
        )
        (example,) = build_examples([record], tokenizer, Lengths(8, 40))
        # a text that was cut off teaches no end of text
        assert list(example.tokens) == [*answer.prompt_tokens, *answer.completion_tokens]


@pytest.mark.filterwarnings("ignore:the chat template gets the date")
def test_a_run_that_goes_on_on_another_day_asks_with_the_date_of_its_beginning(
    folder: Path, tmp_path: Path
):
    target = shutil.copytree(folder / "target", tmp_path / "target")
    (target / "chat_template.jinja").write_text("{{ strftime_now('%d') + messages[0].content }}")
    asked = config(folder, tmp_path / "run", target=str(target), chat=True, max_prompt_tokens=20)
    with begin({"environment": {"began": "2026-11-28 23:59:59"}}):
        store = ShardStore(generate_data(asked) / "data")
    whole = answers(tmp_path / "run")
    min(store.directory.glob("*.parquet")).unlink()
    with begin({"environment": {"began": "2026-11-29 00:00:01"}}):
        generate_data(asked, resume=True)
    assert answers(tmp_path / "run") == whole
