"""The store of texts stays bounded, and comes out the same if a step is repeated."""

from pathlib import Path

import pyarrow
from pyarrow import parquet

from paceline.follow.config import Store
from paceline.follow.store import Kept, TextStore


def texts(folder: Path, names: list[str]) -> list[Path]:
    """Two files with a text for each name."""
    files = []
    for number, part in enumerate((names[::2], names[1::2])):
        ids = [f"{name}/0" for name in part]
        table = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "text": part})
        files.append(folder / f"text-{number}.parquet")
        parquet.write_table(table, files[-1])
    return files


def add(store: TextStore, number: int, *, size: int = 6, slices: str = "ab", origin: str = "t"):
    names = [f"{number}-{index}" for index in range(size)]
    kept = [
        Kept(name, slices[index % len(slices)], 3600.0 * number, number, origin)
        for index, name in enumerate(names)
    ]
    store.add(texts(store.path.parent, names), kept)


def held(store: TextStore) -> set[str]:
    return set(parquet.read_table(store.path)["text"].to_pylist())


def store_at(folder: Path, **settings: float) -> TextStore:
    return TextStore(folder / "store.parquet", Store.model_validate(settings))


def test_all_new_texts_and_a_bounded_sample_of_earlier_ones(tmp_path: Path):
    store = store_at(tmp_path, max_texts=4)
    for number in range(1, 6):
        add(store, number)
        index = store.read()
        assert held(store) == {one.digest for one in index}
        older = [one for one in index if one.round != number]
        assert len(index) - len(older) == 6
        assert len(older) == (4 if number > 1 else 0)
        assert [one.slice for one in older].count("a") == len(older) / 2


def test_a_small_slice_leaves_its_place_to_others(tmp_path: Path):
    store = store_at(tmp_path, max_texts=6)
    add(store, 1, slices="aaaaab")
    add(store, 2)
    slices = sorted(one.slice for one in store.read() if one.round == 1)
    assert slices == ["a"] * 5 + ["b"]


def test_earlier_texts_are_a_uniform_sample_of_all_rounds(tmp_path: Path):
    """Of 20 rounds of 20 texts, 100 are kept: 5.3 of a round, with a spread of about 2."""
    store = store_at(tmp_path, max_texts=100)
    for number in range(1, 21):
        add(store, number, size=20)
    counts = [sum(one.round == number for one in store.read()) for number in range(1, 20)]
    assert sum(counts) == 100
    assert max(counts) < 5.3 + 4.5 * 2
    assert sum(counts[:10]) > 25, "an early round is not forgotten"


def test_old_texts_and_those_of_another_target_go(tmp_path: Path):
    store = store_at(tmp_path, max_texts=100, max_age_h=2)
    for number in range(1, 5):
        add(store, number)
    assert {one.round for one in store.read()} == {2, 3, 4}
    add(store, 5, origin="another")
    assert {one.round for one in store.read()} == {5}
    assert held(store) == {f"5-{index}" for index in range(6)}


def test_a_step_that_is_repeated_gives_the_same_bytes(tmp_path: Path):
    """A run of `align` that goes on compares them; files have more texts than are read at once."""
    store = store_at(tmp_path, max_texts=150)
    for number in (1, 2, 3):
        add(store, number, size=200)
    before = store.path.read_bytes()
    add(store, 3, size=200)
    assert store.path.read_bytes() == before
