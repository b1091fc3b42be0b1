"""What users get wrong: one line that names the place, and exit code 2 (3 if writing fails)."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.texts import Run, one_line, refused, sets

SHORT = sets(max_prompt_tokens=8, max_new_tokens=8)


@pytest.fixture
def broken_draft(pair_folder: Path, tmp_path: Path) -> Path:
    """A draft with one weight that is not a number."""
    draft = tmp_path / "broken"
    shutil.copytree(pair_folder / "draft", draft)
    weights = load_file(draft / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


@pytest.mark.parametrize("command", ["measure", "decode", "align", "verify", "analyze"])
def test_a_draft_with_a_weight_that_is_not_a_number_is_named(
    run: Run, pair_folder: Path, broken_draft: Path, tmp_path: Path, command: str
):
    corpus = pair_folder / "corpus.jsonl"
    training = sets(**{"data.train": corpus}, num_steps=1)
    rest: dict[str, tuple[Any, ...]] = {
        "decode": ("--prompt", "the cat"),
        "align": ("--output", tmp_path / "run", *training),
    }
    arguments = rest.get(command, ("--prompts", corpus, *sets(max_new_tokens=4)))
    pair = ("--target", pair_folder / "target", "--draft", broken_draft)
    line = refused(run, command, *pair, *arguments)
    assert "holds NaN in model.layers.1.mlp.up_proj.weight" in line
    assert str(broken_draft) in line


def test_a_prompt_that_is_not_utf8_is_named_with_its_byte(
    run: Run, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decode = ("decode", "--target", pair_folder / "target")
    as_python_reads_it = "caf\udce9"
    assert "0xe9 at offset 3" in refused(run, *decode, "--prompt", as_python_reads_it)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    assert f"{latin} is not UTF-8 (byte 0xe9 at offset 1)" in refused(
        run, *decode, "--prompt-file", latin
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "standard input is not UTF-8" in refused(run, *decode)


def test_a_prompt_file_may_begin_with_a_byte_order_mark(
    run: Run, pair_folder: Path, tmp_path: Path
):
    rest = ("--temperature", "0", "--max-new-tokens", "3", "--json")
    plain, marked = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_bytes(b"the cat")
    marked.write_bytes(b"\xef\xbb\xbfthe cat")
    decode = ("decode", "--target", pair_folder / "target", *rest)
    texts = [json.loads(run(*decode, "--prompt-file", path)[1]) for path in (plain, marked)]
    assert texts[0]["tokens"] == texts[1]["tokens"]


WRITING = ("task", "corpus", "draft", "align", "generate-data")


@pytest.mark.parametrize(
    ("command", "place", "wanted"),
    [
        *((name, "/proc/paceline/out", 3) for name in WRITING),
        *((name, "{file}/out", 2) for name in WRITING),
        ("align", "/sys/paceline/out", 3),
    ],
)
def test_an_output_where_nothing_can_be_written_is_one_line(
    run: Run, pair_folder: Path, tmp_path: Path, command: str, place: str, wanted: int
):
    file = tmp_path / "file"
    file.write_text("kept")
    out = place.format(file=file)
    models = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    corpus = pair_folder / "corpus.jsonl"
    arguments: dict[str, tuple[Any, ...]] = {
        "task": ("text", "--split", "test", "--count", 1, *sets(corpus=corpus), "--out", out),
        "corpus": ("--out", out),
        "draft": (*models[:2], "--layers", "0", "--out", out),
        "align": (*models, "--output", out, *sets(**{"data.train": corpus}, num_steps=1)),
        "generate-data": (*models[:2], "--prompts", corpus, "--output", out, *SHORT),
    }
    code, _, err = run(command, *arguments[command])
    assert code == wanted
    assert out in one_line(err)
    assert file.read_text() == "kept"


def test_a_file_is_never_put_in_the_place_of_a_device(run: Run, pair_folder: Path, tmp_path: Path):
    """As the superuser one could; a pipe stands for it here."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    chosen = ("--split", "test", "--count", "1", "--set", f"corpus={pair_folder / 'corpus.jsonl'}")
    assert "not a regular file" in refused(
        run, "task", "text", *chosen, "--out", pipe, "--overwrite"
    )
    assert pipe.is_fifo()


# What users do to a configuration: what they write, and what the one line has to say.
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("sampling.tempera=0", "sampling.tempera: unknown key; did you mean temperature?"),
        ("temperature=0", "temperature: unknown key; did you mean sampling.temperature?"),
        ("num_promts=3", "num_promts: unknown key; did you mean num_prompts?"),
        ("prompts={path: p, splitt: x}", "did you mean split?"),
        ("zzz=1", "zzz: unknown key"),
        ("sampling={top_k: 1, top_k: 2}", "the key top_k is given twice"),
    ],
)
def test_an_unknown_key_brings_the_one_that_was_meant(run: Run, key: str, said: str):
    given = ("--target", "t", "--draft", "d", "--prompts", "p")
    assert said in refused(run, "measure", *given, "--set", key)


def test_keys_of_variants_are_suggested_too(run: Run, tmp_path: Path):
    file = tmp_path / "align.yaml"
    file.write_text(
        "target: t\ndraft: d\noutput: o\nnum_steps: 1\ndata: {train: x}\n"
        "objective: [{kind: jsd, bata: 0.2}]\n"
    )
    assert "bata: unknown key; did you mean beta?" in refused(run, "validate", "align", file)
    wrong = sets(**{"strategy.rule.rule": "chow", "strategy.rule.alfa": 1})
    assert "did you mean alpha?" in refused(run, "decode", "--target", "t", "--prompt", "x", *wrong)


def test_a_key_that_is_given_twice_is_refused_with_both_lines(run: Run, tmp_path: Path):
    file = tmp_path / "measure.yaml"
    file.write_text("target: t\nseed: 1\ndraft: d\nprompts: p\nseed: 2\n")
    assert f"{file}: the key seed is given twice, in line 2 and in line 5" in refused(
        run, "validate", "measure", file
    )
    file.write_text("target: &t t\ndraft: *t\nprompts: p\nsampling: {top_k: 3}\n")
    assert run("validate", "measure", file)[0] == 0


def test_a_file_of_another_command_is_called_so(run: Run, tmp_path: Path):
    file = tmp_path / "some.yaml"
    file.write_text(
        "target: t\ndraft: d\noutput: o\nnum_steps: 1\ndata: {train: x}\nobjective: tvd\n"
    )
    line = refused(run, "measure", "--config", file)
    assert (
        f"{file} is a file for paceline align; paceline measure does not know its key output"
        in line
    )
    assert "is a file for paceline align" in refused(run, "validate", "decode", file)


def test_many_unknown_keys_are_counted_and_not_listed(run: Run, tmp_path: Path):
    file = tmp_path / "some.yaml"
    file.write_text("".join(f"qqq{number}: 1\n" for number in range(20)))
    line = refused(run, "validate", "verify", file)
    assert "more" in line
    assert len(line) < 1500


def test_the_example_of_layers_fits_the_target(run: Run, pair_folder: Path, tmp_path: Path):
    two = ("draft", "--target", pair_folder / "draft", "--out", tmp_path / "out")
    assert refused(run, *two, "--layers", "7").endswith("from 0 to 1, for example 0,1")
    four = ("draft", "--target", pair_folder / "target", "--out", tmp_path / "out")
    assert one_line(run(*four, "--layers", "7")[2]).endswith("from 0 to 3, for example 0,1,2,3")


def test_chat_without_a_template_says_what_to_leave_out(run: Run, pair_folder: Path):
    assert "has no chat template; leave --chat out" in refused(
        run, "decode", "--target", pair_folder / "target", "--prompt", "x", "--chat"
    )


@pytest.mark.parametrize("gamma", [63, 1000, 98000])
def test_a_gamma_beyond_the_context_names_the_context_as_it_is(
    run: Run, pair_folder: Path, gamma: int
):
    pair = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    line = refused(run, "decode", *pair, "--prompt", "x", "--gamma", gamma)
    assert f"gamma {gamma} does not fit the models' context of 64 tokens" in line
    assert "-" not in line


def test_task_replaces_a_file_only_when_told_to(run: Run, pair_folder: Path, tmp_path: Path):
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    chosen = ("--split", "test", "--count", "1", "--set", f"corpus={pair_folder / 'corpus.jsonl'}")
    code, _, err = run("task", "text", *chosen, "--out", out)
    assert (code, out.read_text()) == (2, "mine")
    assert f"{out} exists already" in one_line(err)
    assert run("task", "text", *chosen, "--out", out, "--overwrite")[0] == 0
    assert "text" in json.loads(out.read_text())


def test_corpus_replaces_files_only_when_told_to(run: Run, tmp_path: Path):
    mine = tmp_path / "questions.jsonl"
    mine.write_text("mine")
    code, _, err = run("corpus", "--out", tmp_path)
    assert (code, mine.read_text()) == (2, "mine")
    assert f"{mine} exists already" in one_line(err)
    assert list(tmp_path.iterdir()) == [mine]


def test_a_package_that_is_not_installed_is_said_before_anything_is_written(
    run: Run, tmp_path: Path
):
    assert "no_such_package" in refused(
        run, "corpus", "--out", tmp_path / "new", "--package", "no_such_package"
    )
    assert not (tmp_path / "new").exists()
