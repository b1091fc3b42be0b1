"""Directories are read by their files; neither a README.md nor a script in them has a say."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from huggingface_hub.errors import EntryNotFoundError

from paceline.data.prompts import CorpusConfig, read_records, stream_records
from paceline.errors import PromptError

README = """---
configs:
- config_name: default
  data_files: "../secret/s.jsonl"
---
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set whose README.md and script name the secrets beside it."""
    secret, folder = tmp_path / "secret", tmp_path / "set"
    for place in (secret, folder):
        place.mkdir()
    write(secret / "s.jsonl", "SECRET")
    (folder / "README.md").write_text(README)
    (folder / ".huggingface.yaml").write_text(README.replace("---\n", ""))
    (folder / "set.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    return folder


def write(path: Path, *texts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts(folder: Path, split: str | None = None, **more: str) -> list[str]:
    found = [read_records, lambda corpus: list(stream_records(corpus))]
    corpus = CorpusConfig(path=str(folder), split=split, **more)
    first, second = ([str(record.text) for record in read(corpus)] for read in found)
    assert first == second
    return first


@pytest.mark.parametrize("name", ["a.json", "train.jsonl", "data/train-0.jsonl", "a[1].json"])
def test_a_readme_and_a_script_name_no_files(folder: Path, tmp_path: Path, name: str):
    write(folder / name, "mine", "too")
    assert texts(folder, "train") == ["mine", "too"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.filterwarnings("ignore:.*files are read, also")
def test_a_split_is_found_by_the_names_of_files(folder: Path):
    for split in ("train", "test"):
        write(folder / f"{split}-1.jsonl", split)
    assert texts(folder, "test") == ["test"]
    assert texts(folder) == ["test", "train"]
    with pytest.raises(PromptError, match="Unknown split"):
        read_records(CorpusConfig(path=str(folder), split="dev"))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables_are_read_with_their_own_separator(folder: Path, name: str, mark: str):
    (folder / name).write_text(f"id{mark}text\n1{mark}one\n2{mark}two\n")
    assert texts(folder) == ["one", "two"]


def test_a_subset_is_a_directory(folder: Path):
    write(folder / "main/train.jsonl", "main")
    write(folder / "other/train.jsonl", "other")
    assert texts(folder, subset="main") == ["main"]
    with pytest.raises(PromptError, match=r"has no directory default, and its README.md is not"):
        read_records(CorpusConfig(path=str(folder), subset="default"))


@pytest.mark.parametrize("fill", [(), ("picture.png", "script.py", "notes.yaml")])
def test_a_directory_without_data_is_one_line(folder: Path, fill: tuple[str, ...]):
    for name in fill:
        (folder / name).write_text("x")
    with pytest.raises(PromptError, match=r"cannot load|holds no text") as caught:
        read_records(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd"])
def test_a_data_set_of_the_hub_names_no_file_of_this_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    files = {"train": ["hf://datasets/a/b@1/x.jsonl", name]}
    found = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: found)
    with pytest.raises(PromptError, match=f"names {name}, and only hf:// without :: is read"):
        read_records("organisation/set")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub whose data sets have the files of a directory; the patterns with a file system."""
    patterns: list[str] = []

    class Api:
        def __init__(self, **_: Any) -> None:
            pass

        def hf_hub_download(self, filename: str, **_: Any) -> str:
            if not (tmp_path / "1" / filename).exists():
                raise EntryNotFoundError(filename)
            return str(tmp_path / "1" / filename)

    def made(pattern: str, **_: Any) -> None:
        patterns.append(pattern)
        raise FileNotFoundError(pattern)

    monkeypatch.setattr(datasets.load, "HfApi", Api)
    monkeypatch.setattr(
        datasets.load, "cached_path", lambda url, **_: str(tmp_path / "1" / Path(url).name)
    )
    monkeypatch.setattr(datasets.data_files, "url_to_fs", made)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "USE_PARQUET_EXPORT", False)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "README.md").write_text("")
    return patterns


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("a.jsonl", True),
        ("hf://datasets/another/set/a.jsonl", True),
        (f"{datasets.config.HF_ENDPOINT}/datasets/a/b/resolve/main/a.jsonl", True),
        ("reference://a::data:application/json,{}", False),
        ("hf://a::reference://b", False),
        ("a::reference://b", False),
        ("https://a.invalid/a.jsonl", False),
        ("local:///etc/passwd", False),
        ("data:,a", False),
        ("/etc/passwd", False),
    ],
)
def test_a_hub_data_set_opens_no_file_system_but_the_hubs(
    name: str, is_read: bool, file: str, tmp_path: Path, opened: list[str]
):
    """Some run code of their names, as `reference` of fsspec did before 2026.9."""
    text = f"configs: [{{config_name: default, data_files: {json.dumps(name)}}}]"
    marked = f"---\n{text}\n---\n" if file == "README.md" else text
    (tmp_path / "1" / file).write_text(marked)
    wanted = "cannot load" if is_read else "names .*, and only hf:// without :: is read"
    with pytest.raises(PromptError, match=wanted):
        read_records("organisation/set")
    assert [pattern.startswith("hf://") for pattern in opened] == [True] * is_read


@pytest.mark.parametrize("name", ["x::/train.jsonl", "train::.jsonl", "own::/train.jsonl"])
def test_a_name_that_chains_file_systems_is_refused(folder: Path, tmp_path: Path, name: str):
    """With `x`, a link out of the directory, `x::/train.jsonl` would be the file behind it."""
    (folder / "x").symlink_to(tmp_path / "secret" / "s.jsonl")
    write(folder / name, "decoy")
    subset = "own::" if name.startswith("own") else None
    with pytest.raises(PromptError, match=r"names .*::.*, and only / without :: is read"):
        read_records(CorpusConfig(path=str(folder), split="train", subset=subset))


@pytest.mark.parametrize(
    ("names", "split"),
    [
        ("train-00000-of-00001.jsonl test-00000-of-00001.jsonl", "test"),
        ("train/a.jsonl validation/a.jsonl", "validation"),
        ("train-1.jsonl train-2.jsonl", None),
        ("contest.jsonl training.jsonl", None),
        ("a.jsonl test.jsonl", None),
    ],
)
def test_texts_for_testing_are_not_read_with_those_for_training_without_a_word(
    tmp_path: Path, names: str, split: str | None
):
    """As the datasets library finds splits by the names, so that a clone of the hub has them."""
    for name in names.split():
        write(tmp_path / name, name)
    if split is None:
        assert texts(tmp_path) == sorted(names.split())
        return
    with pytest.warns(UserWarning, match=f"all 2 files are read, also {split}"):
        assert texts(tmp_path) == sorted(names.split())
    files = {"train": names.split()[0], split: names.split()[1]}
    for known, name in files.items():
        wanted = datasets.load_dataset(str(tmp_path), split=known)["text"]
        assert texts(tmp_path, known) == list(wanted) == [name]
