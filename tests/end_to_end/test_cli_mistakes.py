"""What users get wrong: one line that names the place, and exit code 2 (3 if writing fails).

Most of it is one table: a command line, and words of the line that it gets. Nothing is written.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

from support.texts import Run, one_line, refused, sets

FILES = {
    "blank.txt": "\n\n",
    "long.txt": "the cat " * 200,
    "third.txt": "the cat\n\n" + "the cat " * 60 + "\nthe hen\n",
    "broken.jsonl": '{"text": "fine"}\n{"text": \n',
    "notes": "text",
    "other.json": "{}",
    "empty.yaml": "",
}


@pytest.fixture(scope="module")
def faults(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target t, the draft d and the texts p.jsonl, beside files and models of every fault."""
    folder = tmp_path_factory.mktemp("faults")
    for name, to in (("t", "target"), ("d", "draft"), ("p.jsonl", "corpus.jsonl")):
        (folder / name).symlink_to(pair_folder / to)
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "latin.txt").write_bytes("déjà".encode("latin-1"))
    nothing = pyarrow.table({"text": pyarrow.array([], "string")})
    pyarrow.parquet.write_table(nothing, folder / "empty.parquet")
    for name in ("empty", "folder", "run"):
        (folder / name).mkdir()
    (folder / "run" / "draft").symlink_to(pair_folder / "draft")
    for name, of in (("corrupt", "target"), ("nan", "draft"), ("swapped", "draft")):
        shutil.copytree(pair_folder / of, folder / name)
    cut = folder / "corrupt" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:100])
    weights = load_file(folder / "nan" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 3] = float("nan")
    save_file(weights, folder / "nan" / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((folder / "swapped" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "swapped" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


PAIR = "--target t --draft d"
GIVEN = f"{PAIR} --prompts p.jsonl"
ALIGN = f"align {PAIR} --output out --set num_steps=1 --set data.train=p.jsonl"
NAN = "holds NaN in model.layers.1.mlp.up_proj.weight"
NO_DRAFT = "there is none; name it by --draft"
MISTAKES = [
    # models
    ("measure --target nowhere/model --draft d --prompts p.jsonl", "nowhere/model"),
    ("measure --target empty --draft d --prompts p.jsonl", "config.json"),
    (
        "measure --target t --draft swapped --prompts p.jsonl",
        "tokenizers of target and draft differ in 2 of",
    ),
    ("decode --target corrupt --prompt the", "corrupt"),
    ("decode --target t --draft nan --prompt 'the cat'", f"nan ... {NAN}"),
    *(
        (
            f"{command} --target t --draft nan --prompts p.jsonl",
            f"nan ... {NAN}",
        )
        for command in ("measure", "verify", "analyze")
    ),
    ("measure --target '' --draft d --prompts p.jsonl", "--target is empty"),
    ("decode --target '' --prompt x", "got '' as a model"),
    (f"measure --engine vllm --url ftp://x {GIVEN}", "'ftp://x' is not the"),
    ("decode --target t --prompt x --chat", "has no chat template; give --raw, or neither"),
    # texts
    (f"measure {PAIR} --prompts nowhere.txt", "nowhere.txt"),
    (f"measure {PAIR} --prompts blank.txt", "no text"),
    (f"measure {PAIR} --prompts broken.jsonl", "line 2"),
    (f"measure {PAIR} --prompts ''", "--prompts is empty"),
    *(
        (
            f"{command} {PAIR} --prompts third.txt --set max_new_tokens=4",
            "third.txt line 3 has  ... holds 64; set max_prompt_tokens",
        )
        for command in ("measure", "analyze", "verify")
    ),
    ("decode --target t --prompt-file long.txt", "shorten the prompt"),
    ("decode --target t --prompt-file nowhere.txt", "nowhere.txt"),
    ("decode --target t --prompt-file blank.txt", "blank.txt is empty; give a text by"),
    ("decode --target t --prompt-file latin.txt", "latin.txt: 'utf-8' codec"),
    ("perplexity --model m --text ''", "--text is empty"),
    ("perplexity --model t --text empty.parquet", "empty.parquet holds no text"),
    # what is missing
    ("measur", "no such command 'measur'"),
    ("measure --drft x", "see paceline measure -h"),
    (f"measure {PAIR}", "prompts"),
    ("measure --target t --prompts p.jsonl", "draft is missing; give --draft, or the key"),
    (f"align {PAIR}", "give --output and --data, or the keys"),
    (f"align {PAIR} --output ''", "--output is empty"),
    ("validate measure empty.yaml", "empty.yaml: target, "),
    *(
        (f"decode --target t --prompt 'the cat' {given}", NO_DRAFT)
        for given in (
            "--gamma 3",
            "--draft-weights int8",
            "--set strategy.num_speculative_tokens=2",
        )
    ),
    ("decode --target t --prompt a --draft-temperature 0", "--draft-temperature"),
    ("corpus --out new --package no_such_package", "no_such_package"),
    *(
        (f"measure {GIVEN} {given}", said)
        for given, said in (
            ("--url http://127.0.0.1:9", "--url needs --engine"),
            ("--write-costs costs.json", "--write-costs needs --engine"),
            ("--engine llamacpp --costs x", "--costs cannot be used with --engine"),
            ("--engine vllm --url http://x --write-costs c", "leave url out"),
            (
                "--engine transformers --set 'write_costs={file: c, batch_sizes: [2]}'",
                "at [1]",
            ),
            ("--engine tgi", "'vllm'"),
            ("--engine transformers --url http://x", "has no url"),
            ("--engine llamacpp --set drafting=probabilistic", "is for vllm, not llamacpp"),
        )
    ),
    ("validate nothing", "'nothing' is not one of draft, "),
    # values
    (f"measure {GIVEN} --set gammas=[0]", "gammas"),
    (f"measure {GIVEN} --gammas 1,two", "gammas.1: Input should be a valid integer"),
    (f"measure {GIVEN} --temperature -1", "temperature"),
    (f"decode {PAIR} --gamma 0 --prompt the", "num_speculative_tokens"),
    (
        f"decode {PAIR} --prompt the --set strategy.rule.rule=chow --set strategy.rule.alpha=2",
        "alpha",
    ),
    (f"analyze {GIVEN} --set rules=[{{rule:}}]", "rules"),
    (f"{ALIGN} --set objective.kind=jsd --set objective.beta=1", "use forward_kl or reverse_kl"),
    (f"verify {GIVEN} --set num_cells={2**40}", "num_cells: "),
    *(
        (f"verify --set {key}={value}", f"{key}: Input should be ")
        for key, value in (
            *(("sampling.temperature", value) for value in (".nan", ".inf", "-.inf")),
            *(("false_alarm", ".nan"), ("tolerance", ".nan")),
        )
    ),
    ("task arithmetic --split dev --out out", "is not one of 'train', 'test'"),
    *(
        (f"decode {PAIR} --prompt 'the cat' --rule '{rule}'", said)
        for rule, said in (
            ("{rule: opt", "the value in --rule '{rule: opt' is not valid YAML"),
            ("oppt", "strategy.speculative.rule"),
            ("nowhere:Rule", "nowhere:Rule is code, which needs permission"),
            ("{rule: opt, alfa: 1}", "alfa"),
        )
    ),
    (
        f"decode {PAIR} --prompt 'the cat' --allow-import nowhere --rule nowhere:Rule",
        "nowhere cannot be imported",
    ),
    (
        f"bench {PAIR} --output out --set task=arithmetic --set 'grid.rules=[{{rule: chow}}]'",
        "alpha is missing; give its alpha, or the key in a file",
    ),
    # drafts
    ("draft --target t --layers 0,9 --out out", "0,9"),
    ("draft --target t --layers a,b --out out", "layers.0: Input should be a valid integer"),
    ("draft --target d --layers 7 --out out", "from 0 to 1, for example 0,1"),
    ("draft --target t --layers 7 --out out", "from 0 to 3, for example 0,1,2,3"),
    ("draft --target t --layers 0 --out d", "or give --overwrite"),
    ("draft --target t --layers 0 --out out --vocabulary 20", "vocabulary needs text for ranking"),
    (
        "draft --target t --layers 0 --out out --vocabulary 9999 --text p.jsonl",
        "draft vocabulary of 9999 tokens",
    ),
    # runs, results and files
    ("align --resume --output out", "holds no run; name the directory of the stopped run"),
    ("pretrain --resume --data p.jsonl --output out --set num_steps=1", "holds no run"),
    ("generate-data --resume --target t --prompts p.jsonl --output out", "holds no run"),
    ("export run --target t --to vllm --out out", "run is the directory of a run; name"),
    *(
        (
            f"export d --target t --to vllm --out out --gamma 63 {flag}",
            "gamma 63 does not fit the models' context of 64 tokens",
        )
        for flag in ("", "--dry-run")
    ),
    ("report nope --html a.html", "nope does not exist"),
    ("report notes", "notes is not JSON"),
    ("report other.json", "is not a result that has a report"),
    ("report folder", "folder holds no run"),
    ("corpus --out notes", "output notes is a file"),
    ("task arithmetic --out . --overwrite", "output . is a directory"),
    (f"measure {GIVEN} --html folder", "--html folder"),
    (f"measure {GIVEN} --html notes/a.html", "--html notes/a.html"),
    # configurations, and what was meant
    ("align --config nowhere.yaml", "nowhere.yaml"),
    ("validate align broken.jsonl", "YAML"),
    (f"measure {GIVEN} --set sampling.tempera=0", "sampling.tempera: unknown key; did you"),
    (f"measure {GIVEN} --set 'sampling={{top_k: 1, top_k: 2}}'", "the key top_k is given twice"),
    (
        "decode --target t --prompt x --set strategy.rule.rule=chow --set strategy.rule.alfa=1",
        "did you mean alpha?",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_two(
    run: Run, faults: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
):
    monkeypatch.chdir(faults)
    before = sorted(faults.rglob("*"))
    line = refused(run, *shlex.split(arguments))
    assert all(part in line for part in said.split(" ... ")), line
    assert sorted(faults.rglob("*")) == before


SHORT = sets(max_prompt_tokens=8, max_new_tokens=8)
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


def test_task_replaces_a_file_only_when_told_to(run: Run, pair_folder: Path, tmp_path: Path):
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    chosen = ("--split", "test", "--count", "1", "--set", f"corpus={pair_folder / 'corpus.jsonl'}")
    code, _, err = run("task", "text", *chosen, "--out", out)
    assert (code, out.read_text()) == (2, "mine")
    assert f"{out} exists already" in one_line(err)
    assert run("task", "text", *chosen, "--out", out, "--overwrite")[0] == 0
    assert "text" in json.loads(out.read_text())
