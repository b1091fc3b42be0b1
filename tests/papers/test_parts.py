"""The parts of `make papers` at the smallest size, by their files, and the task of spelling."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import papers.distillspec.run as distillspec
import papers.faster_cascades.run as cascades
import pytest
from doit.dependency import Dependency
from doit.task import Task
from papers.spelling import Spelling, plain

from papers import dodo, garden, readme, rows, statistics

SMALL = {"hidden_size": 16, "num_heads": 2}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A garden of tiny models, and a copy of the papers' documents."""
    tiny = {
        name: study._replace(
            target=study.target | SMALL | {"num_layers": 1, "num_encoder_layers": 1}
            if name == "spelling"
            else study.target | SMALL | {"num_layers": 2},
            draft=study.draft | SMALL | {"num_layers": 1},
            target_steps=2,
            draft_steps=2,
            answer=40,
        )
        for name, study in garden.STUDIES.items()
    }
    for module in (garden, distillspec, cascades):
        monkeypatch.setattr(module, "STUDIES", tiny)
    copy = tmp_path / "papers"
    shutil.copytree(statistics.PAPERS, copy, ignore=shutil.ignore_patterns("rows", "__pycache__"))
    for module in (statistics, rows, readme):
        monkeypatch.setattr(module, "PAPERS", copy)
    for name, value in (("ROOT", tmp_path), ("NUM_GATE", 20), ("NUM_TEXTS", 400)):
        monkeypatch.setattr(garden, name, value)
    for name, value in (
        ("NUM_STEPS", 4),
        ("NUM_PROMPTS", 6),
        ("RATES", (1e-3,)),
        ("TUNING_DRAWS", (100,)),
    ):
        monkeypatch.setattr(distillspec, name, value)
    monkeypatch.setattr(readme, "_SHUFFLES", 2)
    monkeypatch.setattr(cascades, "NUM_EXAMPLES", 6)
    monkeypatch.setattr(cascades, "DRAFT_STEPS", 2)
    return copy


def another_draw(path: Path) -> Path:
    """The rows of a draw as those of another one, with a little more of each sum."""
    found, drawn = pd.read_csv(path), np.random.default_rng(0)
    for name in ("emitted", "acceptance", "cross_entropy", "score"):
        if name in found:
            found[name] *= drawn.uniform(1, 1.1, len(found))
    copy = path.with_name("another.csv")
    found.assign(draw=1).to_csv(copy, index=False)
    return copy


@pytest.mark.slow
def test_a_garden_gives_rows_tables_charts_and_verdicts(
    small: Path, monkeypatch: pytest.MonkeyPatch
):
    for task in garden.STUDIES:
        garden.make(1, task)
        assert not garden.quality(1, task)["passes"]
    with monkeypatch.context() as patch:
        patch.setattr(distillspec, "arms_of", lambda _: ["fixed", "own"])
        distillspec.tune(1, "sums")
    tuned = json.loads((garden.folder_of(1) / "sums" / "rates.json").read_text("utf-8"))["rates"]
    assert tuned == {"fixed": 1e-3, "own": 1e-3}
    for task in garden.STUDIES:
        rates = json.dumps({"rates": dict.fromkeys(distillspec.ARMS, 1e-3)})
        (garden.folder_of(1) / task / "rates.json").write_text(rates, "utf-8")
    files = [distillspec.run(1, task, 0) for task in garden.STUDIES]
    qualities = [garden.folder_of(1) / task / "quality.json" for task in garden.STUDIES]
    rows.gather("distillspec", 1, [*files, *map(another_draw, files)], qualities)
    files = [cascades.run(1, 0)]
    rows.gather("faster_cascades", 1, [*files, *map(another_draw, files)])
    for name in ("distillspec", "faster_cascades"):
        readme.write(name)
        text = (small / name / "README.md").read_text("utf-8")
        for claim in statistics.read_claims(name):
            assert f"| {claim.id} " in text
        for chart in re.findall(r"\((\w+\.svg)\)", text):
            assert ElementTree.parse(small / name / chart).getroot().tag.endswith("svg")
        assert any(said in text for said in ("undecided", "no gain that matters"))
    claims = small / "direct_alignment" / "claims.yaml"
    claims.write_text(claims.read_text("utf-8") + "# changed\n", "utf-8")
    readme.write("distillspec")
    assert "no verdict" in (small / "distillspec" / "README.md").read_text("utf-8")


def test_a_claim_that_holds_in_one_garden_alone_is_a_flip():
    first = ["holds", "holds", "does not hold", "holds"]
    second = ["holds", "no gain that matters", "no gain that matters", "undecided"]
    names, gardens = ["D1", "D3", "D4", "D10"] * 2, [1] * 4 + [2] * 4
    table = pd.DataFrame({"": names, "garden": gardens, "verdict": first + second})
    assert readme.compared(table) == (
        "Claims that hold in one garden and are refused in another: D3. "
        "Verdicts that differ otherwise, such as undecided in one: D4, D10. "
    )
    assert readme.compared(table[:4]) == ""
    table.loc[:3, "verdict"] = "no verdict: the claims changed"
    assert readme.compared(table) == "", "one garden alone"


def parts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in ("garden", "tune", "draw", "parallel", "fine_tuning", "rows", "readme"):
        for part in getattr(dodo, f"task_{name}")():
            full = f"{name}:{part['name']}"
            assert full not in found
            found[full] = part
    return found


def test_every_file_that_a_part_reads_is_there_or_made():
    made = {str(one) for part in parts().values() for one in part.get("targets", ())}
    for start in dodo.task_parallel_start():
        made |= {str(one) for one in start["targets"]}
    for name, part in parts().items():
        for path in map(str, part["file_dep"]):
            assert path in made or Path(path).exists(), (name, path)
    draws = [one for name, one in parts().items() if name.startswith("draw:")]
    read = [
        path
        for name, one in parts().items()
        if name.startswith("rows:")
        for path in one["file_dep"]
    ]
    assert sorted(map(str, read)) == sorted(str(one["targets"][0]) for one in draws)


# Spelling against numbers that are read back by another road.

_WORDS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
WORDS = dict(zip(_WORDS.split(), [*range(1, 20), *range(20, 100, 10)], strict=True))


def number_of(words: str) -> int:
    """The number that plain words spell, read from the left."""
    total = group = 0
    for word in words.split():
        match word:
            case "hundred":
                group *= 100
            case "thousand" | "million":
                total, group = total + group * {"thousand": 10**3, "million": 10**6}[word], 0
            case _:
                group += WORDS[word]
    return total + group


def test_words_are_the_number_in_the_style_of_the_text():
    examples = Spelling().examples("train", 500, 3)
    styles: set[tuple[bool, bool, bool]] = set()
    for example in examples:
        text = str(example.record.completion)
        number = int(str(example.record.text).replace(" ", "").replace(",", ""))
        assert number_of(plain(text)) == number
        styles.add((" and " in text, ", " in text, "-" in text))
        assert Spelling().score(example, text) == 1
        assert Spelling().score(example, f" {plain(text).upper()}") == 1
        assert Spelling().score(example, text + " one") == 0
    assert len(styles) == 8


def test_no_test_number_is_trained_on():
    parts = [Spelling().examples(split, 2000, 0) for split in ("train", "test")]
    train, test = ({example.record.text for example in part} for part in parts)
    assert not train & test
    assert Spelling().examples("test", 10, 5) == Spelling().examples("test", 20, 5)[:10]


def test_a_part_that_is_done_is_known_if_the_run_is_killed_after_it(tmp_path: Path):
    (needed := tmp_path / "needed").write_text("text")
    part = Task("part", None, file_dep=[str(needed)])
    state = tmp_path / "doit.json"
    Dependency(dodo.KeptDB, str(state)).save_success(part)  # and it is never closed
    assert Dependency(dodo.KeptDB, str(state)).get_status(part, {}).status == "up-to-date"
    needed.write_text("other text")
    assert Dependency(dodo.KeptDB, str(state)).get_status(part, {}).status == "run"
