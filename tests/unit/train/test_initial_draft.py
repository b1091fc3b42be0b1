from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.errors import ConfigError
from paceline.models import load_model
from paceline.train.initial_draft import DraftConfig, check_place, make_draft


def config(folder: Path, **values: Any) -> DraftConfig:
    text = {"text": str(folder / "corpus.jsonl")} if values.pop("ranked", False) else {}
    given = {"target": str(folder / "target"), "out": str(folder / "out")} | text | values
    return validate(DraftConfig, given)


@pytest.mark.parametrize(
    ("values", "num_layers", "width"),
    [
        ({"layers": [0, 2]}, 2, None),
        ({"layers": [1], "hidden_size": 16, "ranked": True}, 1, 16),
        ({"hidden_size": 16, "ranked": True}, 4, 16),
        ({"params": 0.5, "num_layers": 1}, 1, None),
        ({"params": 0.5, "vocabulary": 20, "ranked": True}, 1, None),
    ],
    ids=lambda value: str(value),
)
def test_each_way_makes_its_draft(
    values: dict[str, Any], num_layers: int, width: int | None, folder: Path
):
    target = load_model(folder / "target", dtype="float32")
    made = config(folder, **values)
    draft = make_draft(made, target)
    assert draft.hf.config.num_hidden_layers == num_layers
    assert width is None or draft.hf.config.hidden_size == width
    assert draft.num_parameters < target.num_parameters
    limit = draft.draft_vocabulary
    assert made.vocabulary == (None if limit is None else len(limit))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give layers, a width such as hidden_size, or params"),
        ({"params": 0.1, "layers": [0]}, "got both params .random weights. and layers"),
        ({"params": 0.1, "hidden_size": 16}, "got both params .random weights. and a width"),
        ({"layers": [0], "num_layers": 1}, "num_layers needs params; use layers"),
        ({"hidden_size": 16}, "a width needs text"),
        ({"layers": [0], "vocabulary": 9}, "vocabulary needs text"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    values: dict[str, Any], message: str, folder: Path
):
    with pytest.raises(ConfigError, match=message):
        config(folder, **values)


def test_only_a_model_is_written_over_and_only_where_that_is_asked_for(
    folder: Path, tmp_path: Path
):
    def draft(out: Path, **values: Any) -> DraftConfig:
        return config(folder, layers=[0], out=str(out), **values)

    check_place(draft(tmp_path / "new"))
    check_place(draft(tmp_path))
    (tmp_path / "thesis.tex").write_text("x")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ConfigError, match="exists and is not a model; choose another"):
            check_place(draft(out, overwrite=True))
    with pytest.raises(
        ConfigError, match="contains a model; choose another directory, or give --overwrite"
    ):
        check_place(draft(folder / "draft"))
    check_place(draft(folder / "draft", overwrite=True))
    (folder / "draft" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which is no part of a draft"):
        check_place(draft(folder / "draft", overwrite=True))
    (folder / "draft" / "notes.txt").unlink()
    for out in (folder / "target", folder):
        with pytest.raises(ConfigError, match="contains the target"):
            check_place(draft(out, overwrite=True))
