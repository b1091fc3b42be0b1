"""Data sets of a directory or of the hub, as the datasets library finds their files."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from paceline.data.prompts import CorpusConfig, read_records, stream_records
from paceline.errors import PromptError


def write(path: Path, *texts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts(folder: Path, split: str | None = None, **more: str) -> list[str]:
    found = [read_records, lambda corpus: list(stream_records(corpus))]
    corpus = CorpusConfig(path=str(folder), split=split, **more)
    first, second = ([str(record.text) for record in read(corpus)] for read in found)
    assert first == second
    return first


def test_a_split_is_found_by_the_names_of_files(tmp_path: Path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}-1.jsonl", split)
    assert texts(tmp_path, "test") == ["test"]
    assert texts(tmp_path) == ["test", "train"]
    with pytest.raises(PromptError, match="Unknown split"):
        read_records(CorpusConfig(path=str(tmp_path), split="dev"))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_are_read_with_their_own_separator(tmp_path: Path, name: str, mark: str):
    (tmp_path / name).write_text(f"id{mark}text\n1{mark}one\n2{mark}two\n")
    assert texts(tmp_path) == ["one", "two"]


def test_a_subset_is_a_directory(tmp_path: Path):
    write(tmp_path / "main/train.jsonl", "main")
    write(tmp_path / "other/train.jsonl", "other")
    assert texts(tmp_path, subset="main") == ["main"]


@pytest.mark.parametrize("fill", [(), ("picture.png", "script.py", "notes.yaml")])
def test_a_directory_without_data_is_one_line(tmp_path: Path, fill: tuple[str, ...]):
    for name in fill:
        (tmp_path / name).write_text("x")
    with pytest.raises(PromptError, match="cannot load"):
        read_records(str(tmp_path))


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd"])
def test_a_data_set_of_the_hub_names_no_file_of_this_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    files = {"train": ["hf://datasets/a/b@1/x.jsonl", name]}
    found = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: found)
    with pytest.raises(PromptError, match=f"names {name}, and only files of the hub are read"):
        read_records("organisation/set")
