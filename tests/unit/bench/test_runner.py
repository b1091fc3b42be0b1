"""A bench runs every cell once, keeps what is done, records failures and measures decoding."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchConfig, Grid, bench, read_rows, runner
from paceline.bench.answers import context_of, family, key_of, read_texts, setting
from paceline.bench.workbench import bench_context, cell_key, examples_of, expand
from paceline.config import validate
from paceline.core.rules import Chow, Lossless, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.environment import begin
from paceline.errors import ConfigError, UsageError
from paceline.models import CausalModel, load_model
from paceline.models.loading import load_tokenizer
from paceline.records import RunDirectory
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source, write_rows
from support.data import write_lines
from support.runs import QUESTIONS, bench_config

pytestmark = pytest.mark.slow

GRID = {
    "temperatures": [0.0, 1.0],
    "num_speculative_tokens": [2, 3],
    "rules": [{"rule": "lossless"}, {"rule": "chow", "alpha": [0.5, 1.0]}],
    "strategies": [{"strategy": "token_cascade", "alpha": 0.5}],
}


def settings(folder: Path, output: Path, **changes: Any) -> BenchConfig:
    return bench_config(folder, output, **{"grid": GRID} | changes)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, which tests read, or continue in a copy."""
    output = tmp_path_factory.mktemp("run") / "whole"
    assert bench(settings(folder, output)).num_left == 0
    return output


@pytest.fixture(scope="module")
def finished(whole: Path) -> list[Row]:
    return read_rows(whole)


def by_name(rows: list[Row], temperature: float) -> dict[str, Row]:
    here = [row.setting for row in rows], rows
    return {
        f"{setting['family']} {setting.get('setting', '')}".strip(): row
        for setting, row in zip(*here, strict=True)
        if setting["temperature"] == temperature
    }


def test_a_grid_is_every_rule_with_every_block_length_at_every_temperature():
    cells = validate(Grid, GRID).cells()
    assert len(cells) == 2 * (1 + 3 * 2 + 1)
    greedy = [cell for cell in cells if cell.sampling.greedy]
    assert isinstance(greedy[0].strategy, Autoregressive)
    assert greedy[1].strategy == Speculative(rule=Lossless(), num_speculative_tokens=2)
    assert Speculative(rule=Chow(1.0), num_speculative_tokens=3) in [c.strategy for c in cells]
    twice = validate(Grid, {"rules": [{"rule": "lossless"}] * 2, "temperatures": [1, 1.0]})
    assert len(twice.cells()) == 2


def test_a_strategy_sweeps_how_its_drafts_are_drawn():
    temperatures = [{"temperature": 0}, {"temperature": 0.5}]
    swept = {"strategy": "speculative", "draft_sampling": temperatures}
    found = validate(Grid, {"strategies": [swept], "temperatures": [1]}).cells()
    assert [family(cell) for cell in found[1:]] == [
        "lossless drafts at t0",
        "lossless drafts at t0.5",
    ]


def test_cells_of_an_engine_take_the_bonus_from_the_target():
    given = {"rules": [{"rule": "lossless"}, {"rule": "chow", "alpha": 0.5}], "temperatures": [1]}
    both = [validate(Grid, given).cells(bonus) for bonus in ("rule", "target")]
    assert [family(cell) for cell in both[1]] == ["autoregressive", "lossless", "chow target bonus"]
    assert both[1][:2] == both[0][:2], "lossless decoding has one bonus, and one key"
    assert len({cell_key("", cells[2]) for cells in both}) == 2
    assert "bonus" not in both[0][2].model_dump_json(), "keys of older rows are those of now"


def test_lists_in_a_choice_stand_for_all_combinations():
    choice = {"rule": "lossy", "alpha": [0.1, 0.2], "beta": [1.0, "tuned"]}
    assert [(one["alpha"], one["beta"]) for one in expand(choice)] == [
        (0.1, 1.0),
        (0.1, "tuned"),
        (0.2, 1.0),
        (0.2, "tuned"),
    ]
    assert expand({"rule": "chow", "alpha": 0.5}) == [{"rule": "chow", "alpha": 0.5}]


def test_every_cell_has_a_row_and_its_texts_are_those_of_its_decoder(
    folder: Path, whole: Path, finished: list[Row]
):
    assert len(finished) == len(validate(Grid, GRID).cells())
    assert {row.error for row in finished} == {""}
    texts = read_texts(whole)
    target, draft = (load_model(folder / name, "float32") for name in ("target", "draft"))
    assert target.tokenizer is not None
    rows = by_name(finished, 1.0)
    sampling = SamplingParams()
    decoders = {
        "autoregressive": AutoregressiveDecoder(target, sampling),
        "chow alpha 0.5, gamma 3": SpeculativeDecoder(target, draft, Chow(0.5), 3, sampling),
    }
    for name, decoder in decoders.items():
        for number, tokens in enumerate(texts[key_of(rows[name])]):
            again = decoder.generate([_prompt(target, folder, number)], 9, seed=number)
            assert tokens == again[0].tokens
            stats = again[0].stats
            counts = [rows[name].sums[key][number] for key in (*COUNTS, "emitted", "drafted")]
            assert counts == [
                *(stats.num_target_calls, stats.num_examined, stats.num_recovered),
                *(stats.num_emitted, stats.num_drafted),
            ]


COUNTS = ("calls", "examined", "rejected")


def test_all_tokens_of_a_draft_that_equals_its_target_are_accepted_also_after_a_stop_token(
    folder: Path, tmp_path: Path
):
    grid = {"num_speculative_tokens": [7], "rules": [{"rule": "lossless"}]}
    changes = {"draft": str(folder / "target"), "max_new_tokens": 30, "seed": 2}
    rows = bench(settings(folder, tmp_path / "run", grid=grid, **changes)).rows
    (row,) = (row for row in rows if row.has(family="lossless", temperature=1.0))
    assert FIGURES["draft_acceptance_rate"].value(row) == 1
    assert sum(row.sums["accepted"]) > sum(row.sums["examined"])


def _prompt(target: CausalModel, folder: Path, number: int) -> list[int]:
    task = settings(folder, Path("unused")).task
    text = task.examples("test", 5, 0)[number].record.text
    assert target.tokenizer is not None
    return target.tokenizer(text)["input_ids"]


def test_lossless_cells_answer_as_the_target_does_where_it_is_greedy(
    whole: Path, finished: list[Row]
):
    rows, texts = by_name(finished, 0.0), read_texts(whole)
    alone = rows["autoregressive"]
    for gamma in (2, 3):
        lossless = rows[f"lossless gamma {gamma}"]
        assert texts[key_of(lossless)] == texts[key_of(alone)]
        assert lossless.sums["score"] == lossless.sums["target_score"] == alone.sums["score"]


def test_the_target_alone_is_timed_beside_every_cell_on_the_same_examples(
    finished: list[Row],
):
    for row in finished:
        seconds = row.sums["target_seconds"]
        assert [number for number, alone in enumerate(seconds) if alone is not None] == [0, 2]
        times = zip(row.sums["seconds"], row.sums["first_seconds"], strict=True)
        assert all(whole >= first > 0 for whole, first in times if whole and first)


def test_examples_without_timing_can_be_answered_together(
    folder: Path, whole: Path, finished: list[Row], tmp_path: Path
):
    grid = GRID | {"num_speculative_tokens": [3], "rules": [{"rule": "chow", "alpha": 0.5}]}
    rows = bench(settings(folder, tmp_path / "run", grid=grid, batch_size=2)).rows
    singly, together = read_texts(whole), read_texts(tmp_path / "run")
    known = {str(row.setting): row for row in finished}
    assert len(rows) == 2 * 3
    for one in rows:
        row = known[str(one.setting)]
        assert context_of(row) != context_of(one)
        timed = [seconds is not None for seconds in one.sums["seconds"]]
        assert timed == [True, False, True, False, False]
        assert singly[key_of(row)] == together[key_of(one)]
        for name in ("score", *COUNTS):
            assert row.sums[name] == one.sums[name]


def test_a_finished_bench_runs_nothing_and_a_stopped_one_only_what_is_missing(
    folder: Path,
    whole: Path,
    finished: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    config = settings(folder, shutil.copytree(whole, tmp_path / "run"))
    write_rows(tmp_path / "run" / "rows.jsonl", finished[:4])
    with (tmp_path / "run" / "answers.jsonl").open("a") as stream:
        stream.write('{"key": "half')  # killed while it wrote
    ran: list[DecodingConfig] = []
    plain = runner.run_together

    def counted(work: Any, cells: list[DecodingConfig], told: Any) -> list[Any]:
        ran.extend(cells)
        return plain(work, cells, told)

    monkeypatch.setattr(runner, "run_together", counted)
    manifest = tmp_path / "run" / "manifest.json"
    before = json.loads(manifest.read_text())["environment"]["began"]
    with begin({"environment": {"began": "2050-01-01 00:00:00"}}):
        again = bench(config)
    assert json.loads(manifest.read_text())["environment"]["began"] == before
    assert len(ran) == len(finished) - 4
    assert {key_of(row) for row in again.rows} == {key_of(row) for row in finished}
    ran.clear()
    bench(config)
    assert ran == []


def test_a_cell_that_fails_is_recorded_the_others_go_on_and_it_is_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError("no\nroom")

    grid = GRID | {"num_speculative_tokens": [2], "rules": [{"rule": "lossless"}]}
    config = settings(folder, tmp_path / "run", grid=grid)
    with monkeypatch.context() as patched:
        patched.setattr("paceline.decode.cascade.TokenCascade.blocks", broken)
        rows = bench(config).rows
    failed = [row for row in rows if row.error]
    assert [row.setting["strategy"] for row in failed] == ["token_cascade"] * 2
    assert {row.error for row in failed} == {"no room"}
    fewer = bench(settings(folder, tmp_path / "run", grid=grid | {"strategies": []}))
    assert not any(row.error for row in fewer.rows), "what is asked for no more did not fail"
    assert len(rows) == len(config.cells())
    assert {row.error for row in bench(config).rows} == {""}


def test_another_setting_in_the_same_place_does_not_mix_with_the_old_rows(
    folder: Path, tmp_path: Path
):
    small = {"temperatures": [0.0], "rules": [{"rule": "lossless"}]}
    old = bench(settings(folder, tmp_path / "run", grid=small))
    new = bench(settings(folder, tmp_path / "run", grid=small, num_examples=4))
    assert set(map(key_of, old.rows)).isdisjoint(map(key_of, new.rows))
    assert {len(row.units) for row in read_rows(tmp_path / "run")} == {4}
    again = bench(settings(folder, tmp_path / "run", grid=small))
    assert again.rows == old.rows, "the first bench is finished"


def test_a_model_that_was_trained_on_and_a_corpus_that_was_changed_are_others(
    folder: Path, tmp_path: Path
):
    place = shutil.copytree(folder, tmp_path / "pair")
    config = settings(place, tmp_path / "run")
    first = bench_context(config)
    assert bench_context(config) == first
    os.utime(place / "draft" / "model.safetensors", ns=(1, 1))
    trained = bench_context(config)
    assert trained != first
    write_lines(place / "questions.jsonl", *QUESTIONS[:8])
    assert bench_context(config) != trained


def test_a_model_that_cannot_be_loaded_leaves_the_manifest_of_the_rows(
    folder: Path, whole: Path, tmp_path: Path
):
    shutil.copytree(whole, tmp_path / "run")
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    with pytest.raises(UsageError, match="nowhere"):
        bench(settings(folder, tmp_path / "run", draft=str(folder / "nowhere")))
    assert (tmp_path / "run" / "manifest.json").read_text() == manifest


def test_cells_and_the_target_alone_take_every_turn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An order that depended on the example's number would time all timed ones in one order."""
    order: list[str] = []
    plain = runner.time_request

    def noted(decoder: Any, *arguments: Any) -> Any:
        order.append(type(decoder).__name__)
        return plain(decoder, *arguments)

    monkeypatch.setattr(runner, "time_request", noted)
    grid = {"temperatures": [0.0], "rules": [{"rule": "lossless"}]}
    bench(settings(folder, tmp_path / "run", grid=grid, num_examples=9, num_timed=9))
    places = {turn % 3 for turn, name in enumerate(order) if name == "SpeculativeDecoder"}
    assert places == {0, 1, 2}


def test_cells_of_one_sampler_take_turns_a_few_at_a_time():
    grid = {"rules": [{"rule": "chow", "alpha": [n / 20 for n in range(10)]}]}
    cells = validate(Grid, grid).cells()
    found = list(runner.groups(cells))
    assert [(number, len(together)) for number, together in found] == [
        (0, 8),
        (8, 3),
        (11, 8),
        (19, 3),
    ]
    assert [cell for _, together in found for cell in together] == cells
    assert all(len({c.sampling.temperature for c in together}) == 1 for _, together in found)


def test_places_and_rows_that_cannot_be_used_are_one_line(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; choose a new directory"):
        bench(settings(folder, tmp_path / "file"))
    torn = settings(folder, tmp_path / "torn")
    RunDirectory(torn.output).write_manifest(torn)
    (tmp_path / "torn" / "rows.jsonl").write_text('{"schema\n{"schema_version": 2}\n')
    with pytest.raises(UsageError, match="is not a JSON object"):
        bench(torn)
    (tmp_path / "foreign").mkdir()
    foreign = Row(population="p", units=(), setting={}, totals={"x": 1}, source=Source(command="c"))
    write_rows(tmp_path / "foreign" / "rows.jsonl", [foreign])
    with pytest.raises(UsageError, match="has a row that no bench wrote"):
        read_rows(tmp_path / "foreign")
    with pytest.raises(UsageError, match="has 9 distinct examples, 12 were requested"):
        bench(settings(folder, tmp_path / "many", num_examples=12))


def test_names_of_cells_tell_family_and_setting_apart():
    cell = DecodingConfig(strategy=Speculative(rule=TokenV3(0.25), num_speculative_tokens=5))
    assert (family(cell), setting(cell)) == ("token_v3", "alpha 0.25, gamma 5")
    rules = [
        {"rule": "lossy", "alpha": 0.5, "beta": "tuned"},
        {"rule": "lenient", "kind": "square", "epsilon": 0.5},
    ]
    names = [family(validate(DecodingConfig, {"strategy": {"rule": rule}})) for rule in rules]
    assert names == ["lossy beta tuned", "lenient square"]
    drafts = {"temperature": 0.6, "top_k": 9, "top_p": 0.9}
    strategy = {"rule": {"rule": "chow", "alpha": 0.5}, "draft_sampling": drafts}
    cell = validate(DecodingConfig, {"strategy": strategy})
    assert family(cell) == "chow drafts at t0.6 p0.9 k9"


def test_benches_of_other_texts_do_not_share_examples(folder: Path, tmp_path: Path):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", *[{"prompt": "the cat", "completion": " ran"}] * 2)
    names, tokenizer = list[str](), load_tokenizer(folder / "target")
    for name, seed in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        task = {"task": "pairs", "corpus": str(tmp_path / f"{name}.jsonl"), "metric": "rouge1"}
        config = settings(folder, tmp_path / "run", task=task, num_examples=1, seed=seed)
        row = examples_of(config, tokenizer).row(DecodingConfig(), units=(), error="none")
        names.append(row.population)
    assert len(set(names)) == 3
    assert names[0] == names[3]


def test_a_prompt_longer_than_the_context_is_one_line(folder: Path, tmp_path: Path):
    write_lines(tmp_path / "long.jsonl", {"prompt": "the cat " * 60, "completion": " ran"})
    task = {"task": "pairs", "corpus": str(tmp_path / "long.jsonl")}
    with pytest.raises(UsageError, match=r"has \d+ tokens.* 64"):
        bench(settings(folder, tmp_path / "run", task=task, num_examples=1))


def test_a_skipped_example_leaves_the_others_their_seeds(folder: Path, tmp_path: Path):
    """The second part of the examples, answered alone, has the answers that it has in the whole."""
    grid = GRID | {"temperatures": [1.0], "rules": [{"rule": "lossless"}], "strategies": []}
    whole = bench(settings(folder, tmp_path / "whole", grid=grid, num_examples=4)).rows
    part = {"num_examples": 2, "skip_examples": 2}
    rows = bench(settings(folder, tmp_path / "part", grid=grid, **part)).rows
    known = read_texts(tmp_path / "whole") | read_texts(tmp_path / "part")
    for one, other in zip(whole, rows, strict=True):
        assert (one.units, other.units) == ((0, 1, 2, 3), (2, 3))
        texts = [known[key_of(row)] for row in (one, other)]
        assert texts[0][2:] == texts[1]
        assert texts[0][:2] != texts[1]
