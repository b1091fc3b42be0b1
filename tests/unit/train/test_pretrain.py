"""New models and drafts, and pretraining: what it learns, how it goes on and what it says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paceline.config import validate
from paceline.data.input_checks import InputChecks
from paceline.errors import ConfigError, ContextLengthError, PromptError
from paceline.models import load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.scratch import (
    END_OF_TEXT,
    NewModel,
    NewT5,
    NewTokenizer,
    write_new_model,
)
from paceline.records import read_jsonl
from paceline.train import PretrainConfig, align, pretrain
from paceline.train.config import AlignData
from paceline.train.initial_draft import DraftConfig, check_place, make_draft
from support.configs import small
from support.data import write_lines
from support.models import tiny_hf
from support.runs import align_config, losses, write_pair

TEXTS = [f"{a} plus {b} makes {a + b}." for a in range(6) for b in range(6)]
STEADY: dict[str, Any] = {"kind": "adamw", "learning_rate": 1e-2}
SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}


def corpus(folder: Path, rows: list[dict[str, Any]], name: str = "corpus.jsonl") -> str:
    return str(write_lines(folder / name, *rows))


def settings(folder: Path, output: Path, **changes: Any) -> PretrainConfig:
    text = corpus(folder, [{"text": text} for text in TEXTS])
    values = {"model": SHAPE, "tokenizer": {"vocab_size": 270}, "optimizer": STEADY}
    data = {"data": {"train": text, "held_out": text}}
    return small("pretrain", folder, output, **values | data | changes)


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def weights(run: Path) -> list[torch.Tensor]:
    return [w.detach().clone() for w in load_model(run / "model", "float32").hf.parameters()]


def test_a_new_model_learns_and_its_figures_are_those_of_a_plain_cross_entropy(tmp_path: Path):
    text = corpus(tmp_path, [{"text": text} for text in TEXTS])
    data = {"train": text, "held_out": text, "pack_documents": False}
    run = pretrain(settings(tmp_path, tmp_path / "run", data=data))
    found = result(run)
    assert found["before"]["loss"] == pytest.approx(math.log(270), rel=0.02)
    assert found["after"]["loss"] < 0.9 * found["before"]["loss"]
    model = load_model(run / "model", "float32")
    assert model.tokenizer is not None
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([model.tokenizer(text + END_OF_TEXT)["input_ids"]])
        assert ids.shape[1] <= 16, "one piece each"
        logits = model.hf(ids).logits[0, :-1].detach()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    assert found["after"]["num_tokens"] == count
    assert found["after"]["loss"] == pytest.approx(total / count, rel=1e-4)


def test_only_completions_carry_loss_where_there_are_prompts(tmp_path: Path):
    pairs = [{"prompt": "1 + 1 =", "completion": " 2"}] * 4
    data = {"train": corpus(tmp_path, pairs, "pairs.jsonl")}
    run = pretrain(settings(tmp_path, tmp_path / "run", data=data, num_steps=1))
    (row,) = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert row["num_tokens"] == 4 * 2, "the answer and the end of the text"


def test_training_goes_on_from_an_existing_model_and_leaves_it_alone(tmp_path: Path):
    first = pretrain(settings(tmp_path, tmp_path / "first"))
    before = weights(first)
    second = pretrain(settings(tmp_path, tmp_path / "second", model=str(first / "model")))
    assert all(map(torch.equal, before, weights(first)))
    assert result(second)["before"]["loss"] == pytest.approx(
        result(first)["after"]["loss"], rel=1e-4
    )


def test_the_same_seed_makes_the_same_model_and_digits_are_single_tokens(tmp_path: Path):
    shape = NewModel(**SHAPE)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_new_model(shape, NewTokenizer(vocab_size=280), TEXTS, tmp_path / name, seed=seed)
    a, b, c = (load_model(tmp_path / name, "float32") for name in "abc")
    pairs = zip(a.hf.parameters(), b.hf.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert not torch.equal(a.hf.get_input_embeddings().weight, c.hf.get_input_embeddings().weight)
    assert a.tokenizer is not None
    text = "a 1234 plus 56"
    tokens = a.tokenizer(text)["input_ids"]
    assert a.tokenizer.decode(tokens) == text
    pieces = [a.tokenizer.decode([token]).strip() for token in tokens]
    assert [piece for piece in pieces if piece.isdigit()] == list("123456")


@pytest.mark.parametrize("shape", [NewModel(**SHAPE), NewT5(kind="t5", hidden_size=16)], ids=str)
def test_ids_of_a_tokenizer_may_have_gaps(tmp_path: Path, shape: NewModel | NewT5):
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "the": 2, "quick": 3, "b": 20}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="a")
    tokenizer.save_pretrained(tmp_path / "tokens")
    tiny_hf("llama", vocab_size=21).save_pretrained(tmp_path / "tokens")
    write_new_model(shape, str(tmp_path / "tokens"), TEXTS, tmp_path / "new", seed=0)
    model = load_model(tmp_path / "new")
    assert model.hf.get_input_embeddings().weight.shape[0] == model.vocab_size == 21
    assert model.start_session().prefill([[20]]).shape == (1, 21)


def test_bad_shapes_lengths_and_texts_are_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="hidden_size 15 must be an even multiple of num_heads"):
        settings(tmp_path, tmp_path / "x", model={**SHAPE, "hidden_size": 15})
    with pytest.raises(ContextLengthError, match="is 72, but the model's context holds 32"):
        pretrain(settings(tmp_path, tmp_path / "y", max_prompt_tokens=64))
    only = corpus(tmp_path, [{"prompt": "1 + 1 ="}], "prompts.jsonl")
    data = {"train": corpus(tmp_path, [{"text": "a b c"}]), "held_out": only}
    with pytest.raises(PromptError, match="prompts without completions"):
        pretrain(settings(tmp_path, tmp_path / "z", data=data))
    data = {"train": data["train"], "streaming": True, "pack_documents": False}
    with pytest.raises(ConfigError, match="streaming needs pack_documents"):
        settings(tmp_path, tmp_path / "run", data=data)


def test_a_check_of_a_streamed_data_set_does_not_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The datasets library writes what it converts into its cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\n" + "\n".join(TEXTS))
    data = {"train": {"path": str(tmp_path / "set"), "split": "train"}, "streaming": True}
    settings(tmp_path, tmp_path / "run", data=data).check(checks := InputChecks())
    assert f"data.train: {tmp_path / 'set'}, {len(TEXTS)} texts" in checks.lines
    rehearsed = AlignData.model_validate({"train": "t", "pretraining": data["train"]})
    checks.texts(rehearsed, "pretraining")
    assert f"data.pretraining: {tmp_path / 'set'}, {len(TEXTS)} texts" in checks.lines
    assert not list(tmp_path.glob("cache/**/*.arrow"))


def test_text_that_is_read_as_it_is_needed_teaches_and_is_gone_on_with(tmp_path: Path):
    text = corpus(tmp_path, [{"text": text} for text in TEXTS])
    steady = STEADY | {"schedule": {"kind": "constant"}, "warmup_fraction": 0}
    data = {"train": text, "held_out": text, "streaming": True}
    changes = {"data": data, "optimizer": steady}
    whole = pretrain(settings(tmp_path, tmp_path / "whole", num_steps=24, **changes))
    assert result(whole)["after"]["loss"] < 0.9 * result(whole)["before"]["loss"]
    run = pretrain(settings(tmp_path, tmp_path / "run", num_steps=15, **changes))
    assert read_jsonl(run / "packing.jsonl"), "an epoch is shorter than that"
    pretrain(settings(tmp_path, tmp_path / "run", num_steps=24, **changes), resume=True)
    assert all(map(torch.equal, weights(run), weights(whole)))


def test_a_run_is_resumed_when_a_text_that_could_not_be_read_is_mended(tmp_path: Path):
    rows = [{"text": text} for text in TEXTS]
    text = corpus(tmp_path, rows)
    changes = {"num_steps": 30, "data": {"train": text, "streaming": True}}
    whole = pretrain(settings(tmp_path, tmp_path / "whole", **changes))

    def spoil(stage: str, *_: object) -> None:
        if stage == "training":
            corpus(tmp_path, [*rows[:3], {"text": 3}, *rows[3:]])

    often = {"checkpoints": {"every_steps": 1}}
    with pytest.raises(PromptError, match="line 4"):
        pretrain(settings(tmp_path, tmp_path / "run", **changes, **often), progress=spoil)
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    corpus(tmp_path, rows)
    run = pretrain(settings(tmp_path, tmp_path / "run", **changes), resume=True)
    assert all(map(torch.equal, weights(run), weights(whole)))


def test_a_draft_of_some_tokens_is_pretrained_over_these(tmp_path: Path):
    """Its loss is a cross entropy over the tokens that it may propose, of the labels among them."""
    start = pretrain(settings(tmp_path, tmp_path / "start", num_steps=1)) / "model"
    draft = load_model(start, "float32")
    assert draft.tokenizer is not None
    packed = [t for text in TEXTS for t in draft.tokenizer(text + END_OF_TEXT)["input_ids"]]
    some = torch.tensor(sorted(set(packed), reverse=True)[::2])
    save_draft(wrap_model(draft.hf, draft.tokenizer, some), start, tmp_path / "draft")
    run = pretrain(settings(tmp_path, tmp_path / "run", model=str(tmp_path / "draft"), num_steps=1))
    found = result(run)["before"]
    (row, *_) = read_jsonl(run / "metrics.jsonl")
    assert row["evaluation"] == found
    total, right, count, labels = 0.0, 0, 0, 0
    for begin in range(0, len(packed), 16):
        ids = torch.tensor([packed[begin : begin + 16]])
        if ids.shape[1] < 2:
            continue
        logs = draft.hf(ids).logits[0, :-1].detach()[:, some].log_softmax(-1)
        for log, label in zip(logs, ids[0, 1:].tolist(), strict=True):
            labels += 1
            if label in some:
                place = some.tolist().index(label)
                total -= float(log[place])
                right += int(log.argmax()) == place
                count += 1
    assert 0 < count < labels
    assert found["loss"] == pytest.approx(total / count, rel=1e-4)
    assert found["accuracy"] == pytest.approx(right / count)
    # training looks at the same: a step over all of it has the same loss
    data = {"train": str(tmp_path / "corpus.jsonl"), "held_out": None, "pack_documents": True}
    size = -(-len(packed) // 16)
    one = {"num_steps": 1, "batch_size": size, "mean": "token", "data": data}
    run = pretrain(settings(tmp_path, tmp_path / "all", model=str(tmp_path / "draft"), **one))
    (first,) = read_jsonl(run / "metrics.jsonl")
    assert first["num_tokens"] == count
    assert first["loss"] == pytest.approx(total / count, rel=1e-4)


_PAIRS = [{"prompt": "the rain", "completion": f"an inn and {word}"} for word in ("tin", "hen")]


@pytest.mark.parametrize("command", ["align", "pretrain"])
def test_a_label_that_the_model_may_not_emit_is_trained_as_before(tmp_path: Path, command: str):
    """Its logit is -1e4 elsewhere: the loss would be 1e4, and would never fall."""
    folder = write_pair(tmp_path / "pair", architecture="t5_v1_1")
    write_lines(folder / "corpus.jsonl", *(_PAIRS * 4))
    text = str(folder / "corpus.jsonl")
    changes = {"model": str(folder / "draft"), "data": {"train": text, "held_out": text}}

    def run(name: str) -> list[float]:
        if command == "pretrain":
            more = {"num_steps": 2, "max_completion_tokens": 12}
            made = pretrain(small("pretrain", folder, tmp_path / name, **more, **changes))
            rows = read_jsonl(made / "metrics.jsonl")
            return [value for row in rows for key, value in row.items() if key.endswith("loss")]
        settings = {"objective": "cross_entropy", "num_steps": 2}
        return losses(align(align_config(folder, tmp_path / name, **settings)))

    plain = run("plain")
    for name in ("draft", "target"):
        path = folder / name / "generation_config.json"
        bad = [[token] for token in range(3, 200)]
        path.write_text(path.read_text().replace("{", f'{{"bad_words_ids": {bad},', 1))
    assert max(plain) < 100
    assert run("banned") == plain


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
        ({"params": 0.1, "layers": [0]}, "got both params .random weights. and layers"),
        ({"params": 0.1, "hidden_size": 16}, "got both params .random weights. and a width"),
        ({"layers": [0], "num_layers": 1}, "num_layers needs params; use layers"),
        ({"hidden_size": 16}, "a width needs text"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    values: dict[str, Any], message: str, folder: Path
):
    with pytest.raises(ConfigError, match=message):
        config(folder, **values)


def test_only_a_model_is_written_over_and_only_where_that_is_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setenv("HOME", str(folder))
    whole = str(folder / "target")
    for out, target in ((folder / "target", whole), (folder, whole), (folder, "~/target")):
        named = draft(out, overwrite=True).model_copy(update={"target": target})
        with pytest.raises(ConfigError, match="contains the target"):
            check_place(named)
