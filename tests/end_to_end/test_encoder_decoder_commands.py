"""Commands on encoder-decoders: a T5 pair that is trained, measured, decoded and aligned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.models import load_model
from paceline.records import read_jsonl
from paceline.results import read_rows
from paceline.train import pretrain
from support.configs import small
from support.data import write_lines
from support.texts import refused, sets, succeeded

WORDS = "one two three four five six seven eight nine ten eleven twelve red blue green".split()  # noqa: SIM905
NUMBERS = [*WORDS, *(f"{first} {second}" for first in WORDS[:8] for second in WORDS[4:12])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words and the same words backwards, as pairs."""
    folder = tmp_path_factory.mktemp("t5")
    rows = [{"prompt": text, "completion": " ".join(text.split()[::-1])} for text in NUMBERS]
    write_lines(folder / "pairs.jsonl", *rows)
    write_lines(folder / "prompts.jsonl", *[{"prompt": row["prompt"]} for row in rows[:16]])
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Path:
    """Target and draft, trained from nothing by `pretrain`."""
    target = {"hidden_size": 32, "num_layers": 2}
    draft = {"hidden_size": 16, "num_layers": 1, "num_encoder_layers": 2}
    texts, adamw = str(folder / "pairs.jsonl"), {"kind": "adamw", "learning_rate": 1e-2}
    settings = {"num_steps": 40, "batch_size": 16, "optimizer": adamw, "stored_dtype": "float32"}
    settings |= {"max_prompt_tokens": 24, "max_completion_tokens": 24}
    settings |= {"data": {"train": texts, "held_out": texts, "pack_documents": False}}
    for name, sizes in (("target", target), ("draft", draft)):
        of_target = str(folder / "target/model")
        settings["tokenizer"] = {"vocab_size": 300} if name == "target" else of_target
        model = {"kind": "t5", "num_heads": 2, **sizes}
        run = pretrain(small("pretrain", folder, folder / name, model=model, **settings))
        result = json.loads((run / "result.json").read_text())
        assert result["after"]["loss"] < 0.8 * result["before"]["loss"]
    return folder


def models(folder: Path) -> tuple[Any, ...]:
    return "--target", folder / "target/model", "--draft", folder / "draft/model"


SHORT = sets(num_prompts=8, max_new_tokens=12)


def test_a_new_t5_has_a_head_of_its_own_and_reads_ends_of_texts(pair: Path):
    model = load_model(pair / "target/model")
    assert model.decoder_prompt == (model.tokenizer.pad_token_id,)  # pyright: ignore
    assert model.hf.get_output_embeddings().weight is not model.hf.get_input_embeddings().weight
    (text,) = model.tokenizer(["red"])["input_ids"]  # pyright: ignore
    assert text[-1] == model.tokenizer.eos_token_id  # pyright: ignore


def test_measure_times_passes_of_an_encoder_decoder(run, pair: Path):
    given = (*models(pair), "--prompts", pair / "prompts.jsonl", *SHORT, "--table")
    code, out, _ = run("measure", *given, *sets(gammas="[1,2]", pass_repeats=2, timed_prompts=2))
    assert code == 3
    assert re.search(r"one pass +target .* ms, draft .* ms", out)


def test_decode_streams_and_analyze_compares_rules(run, pair: Path):
    code, out, err = run("decode", *models(pair), "--prompt", "six seven", "--show")
    assert code == 0
    assert out.strip()
    assert "tokens per target call" in err
    given = (*models(pair), "--prompts", pair / "prompts.jsonl", *SHORT)
    code, out, _ = run("analyze", *given, *sets(rules="[lossless, {rule: chow, alpha: 0.3}]"))
    assert code == 0
    assert "chow" in out.lower()


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (["--layers", "0", "--encoder-layers", "1"], (1, 1)),
        (["--layers", "1", "--vocabulary", "60", "--text", "pairs.jsonl"], (1, 2)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_drafts_are_made_and_decode(
    run, pair: Path, tmp_path: Path, options: list[str], layers: tuple[int, int]
):
    options = [str(pair / part) if part.endswith("jsonl") else part for part in options]
    target, out = pair / "target/model", tmp_path / "draft"
    succeeded(run, "draft", "--target", target, "--out", out, *options)
    made = load_model(out)
    assert (made.hf.config.num_decoder_layers, made.hf.config.num_layers) == layers
    succeeded(run, "decode", "--target", target, "--draft", out, "--prompt", "one two")


@pytest.mark.parametrize("recipe", ["supervised_kd", "f_distill", "gkd"])
def test_text_of_every_origin_aligns(run, pair: Path, tmp_path: Path, recipe: str):
    succeeded(
        run,
        *("align", *models(pair), "--output", tmp_path / "run", "--recipe", recipe),
        *sets(**{"data.train": pair / "pairs.jsonl", "data.held_out": pair / "prompts.jsonl"}),
        *sets(num_steps=15, batch_size=16, max_prompt_tokens=24, max_completion_tokens=16),
        *sets(**{"evaluation.max_new_tokens": 12, "optimizer.learning_rate": 1e-2}),
        *sets(**{"optimizer.kind": "adamw"}),
    )
    result = json.loads((tmp_path / "run/result.json").read_text())
    before, after = (result[when]["expected_acceptance"] for when in ("before", "after"))
    assert after > before


def test_generated_data_trains(run, pair: Path, tmp_path: Path):
    out = tmp_path / "data"
    given = ("--target", pair / "target/model", "--prompts", pair / "prompts.jsonl")
    succeeded(
        run,
        *("generate-data", *given, "--output", out, *sets(draft=pair / "draft/model")),
        *sets(max_prompt_tokens=24, max_new_tokens=12, temperatures="[0, 1]", num_per_prompt=2),
    )
    assert json.loads((out / "result.json").read_text())["num_records"] == 32
    succeeded(
        run,
        *("align", *models(pair), "--output", tmp_path / "run"),
        *sets(**{"data.train": out / "data"}, num_steps=2, batch_size=8),
    )


def test_a_bench_of_translations_has_corpus_figures(run, pair: Path, tmp_path: Path):
    task = f"{{task: translation, corpus: {pair / 'pairs.jsonl'}, separator: ''}}"
    succeeded(
        run,
        *("bench", *models(pair), "--output", tmp_path / "run"),
        *sets(task=task, num_examples=6, max_new_tokens=12),
        *sets(**{"grid.rules": "[lossless, {rule: chow, alpha: 0.3}]", "grid.temperatures": "[0]"}),
    )
    rows = read_jsonl(tmp_path / "run/rows.jsonl")
    assert len(rows) == 3
    assert all(set(row["totals"]) >= {"bleu", "chrf"} for row in rows)
    plain, lossless, _ = (one["tokens"] for one in read_jsonl(tmp_path / "run/answers.jsonl"))
    assert plain == lossless


@pytest.mark.filterwarnings("default:.*are truncated on the right")
def test_long_sources_of_a_bench_are_truncated_on_request(run, pair: Path, tmp_path: Path):
    task = f"{{task: translation, corpus: {pair / 'pairs.jsonl'}, separator: ''}}"
    code, _, err = run(
        *("bench", *models(pair), "--output", tmp_path / "run"),
        *sets(task=task, num_examples=40, max_new_tokens=4, max_prompt_tokens=2),
        *sets(**{"grid.rules": "[lossless]", "grid.temperatures": "[0]"}),
    )
    assert code == 0, err
    assert "are longer than 2 tokens and are truncated on the right" in err


def test_a_trajectory_and_an_export_run(run, pair: Path, tmp_path: Path):
    texts = {"data.train": pair / "pairs.jsonl", "data.held_out": pair / "prompts.jsonl"}
    succeeded(
        run,
        *("align", *models(pair), "--output", tmp_path / "kl", *sets(**texts)),
        *sets(**{"num_steps": 4, "batch_size": 4, "checkpoints.every_steps": 2}),
        *sets(**{"evaluation.num_prompts": 4, "evaluation.max_new_tokens": 8}),
    )
    aligned = tmp_path / "kl/draft"
    task = f"{{reversed: {pair / 'prompts.jsonl'}}}"
    succeeded(
        run,
        *("trajectory", "--target", pair / "target/model", "--run", aligned.parent),
        *("--output", tmp_path / "trajectory", *SHORT, *sets(tasks=task)),
    )
    *_, last = read_rows(tmp_path / "trajectory/rows.jsonl")
    assert last.setting.items() >= {"draft": "kl", "label": "end"}.items()
    draft = ("export", aligned, "--target", pair / "target/model")
    out = succeeded(run, *draft, "--to", "transformers", "--out", tmp_path / "exported")
    assert "AutoModelForSeq2SeqLM" in out
    assert "decoder layers" not in out
    assert "is an encoder-decoder, which vllm cannot serve with a draft" in refused(
        run, *draft, "--to", "vllm", "--out", tmp_path / "refused"
    )


def test_what_an_encoder_decoder_has_no_use_for_is_one_line(run, pair: Path, tmp_path: Path):
    start = ("align", *models(pair), "--output", tmp_path / "run", *sets(num_steps=1))
    documents = write_lines(tmp_path / "documents.jsonl", {"text": "red blue"})
    assert "has a prompt but no completion" in refused(
        run, *start, *sets(**{"data.train": documents})
    )
    of_text = ("perplexity", "--model", pair / "target/model", "--text", pair / "pairs.jsonl")
    assert "is an encoder-decoder, which does not continue documents" in refused(run, *of_text)
