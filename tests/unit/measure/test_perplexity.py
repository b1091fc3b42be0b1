"""Perplexity is that of a plain float64 loop; what is said before weights are read."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config import validate
from paceline.data.input_checks import InputChecks
from paceline.data.prompts import CorpusConfig
from paceline.errors import InputNote, PromptError
from paceline.measure.perplexity import (
    document_nats,
    num_bytes_of,
    perplexity,
    read_documents,
)
from paceline.models import load_model
from support.checkpoints import edit
from support.configs import small
from support.data import write_lines
from support.fakes import TableModel
from support.models import tiny_hf, tiny_model

CPU = {"dtype": "float32", "device": "cpu"}
TEXTS = ["the cat sat near the inn", "a hen ran", "then the man and the hen", "ä"]


def nats_of_table(model: TableModel, tokens: list[int], longest: int) -> float:
    total = 0.0
    for position in range(1, len(tokens)):
        start = (position - 1) // longest * longest
        total -= float(model.log_probs(tokens[start:position])[tokens[position]])
    return total


@pytest.mark.parametrize("max_length", [None, 1, 3, 7, 300])
@pytest.mark.parametrize("count", [2, 7, 8, 600])
def test_every_token_but_the_first_is_predicted_once(max_length: int | None, count: int):
    model = TableModel.random(5, order=2, seed=1, max_length=max_length)
    tokens = torch.randint(5, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = nats_of_table(model, tokens, max_length or count)
    assert document_nats(model, tokens) == pytest.approx(wanted, rel=1e-12)


def test_a_transformer_is_scored_as_by_a_float64_loop():
    model, double = tiny_model(seed=0), tiny_hf(seed=0).double().eval()
    tokens = torch.randint(20, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    wanted = 0.0
    with torch.inference_mode():
        for position in range(1, len(tokens)):
            logits = double(torch.tensor([tokens[:position]])).logits[0, -1, : model.vocab_size]
            wanted -= float(logits[tokens[position]] - logits.logsumexp(-1))
    assert document_nats(model, tokens) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_figures_of_a_corpus_follow_from_its_counts(folder: Path, tmp_path: Path):
    corpus = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in TEXTS))
    found = perplexity(small("perplexity", folder, tmp_path, text=str(corpus), **CPU))
    model = load_model(folder / "target", "float32", "cpu")
    assert model.tokenizer is not None
    documents = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    scored = [document for document in documents if len(document) > 1]
    nats = sum(document_nats(model, document) for document in scored)
    assert found.num_documents == len(scored)
    assert found.num_tokens == sum(len(document) - 1 for document in scored)
    assert found.nats == pytest.approx(nats, rel=1e-4)
    assert found.perplexity.value == pytest.approx(math.exp(found.nats / found.num_tokens))
    assert found.perplexity.low < found.perplexity.value < found.perplexity.high
    assert found.bits_per_byte.value == pytest.approx(found.nats / math.log(2) / found.num_bytes)
    assert found.corpus is not None


def test_tokens_that_the_model_may_not_write_have_the_probability_of_its_softmax(
    model_directory: Path, tmp_path: Path
):
    hf: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64)
    tokens = [5, 9, 7, 9, 8]
    edit(model_directory / "generation_config.json", suppress_tokens=[9], bad_words_ids=[[7]])
    text = write_lines(tmp_path / "a.jsonl", {"tokens": tokens})
    config = small("perplexity", tmp_path, tmp_path, model=str(model_directory), text=str(text))
    with torch.inference_mode():
        scores_TV = hf(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    wanted = -sum(float(row[token]) for row, token in zip(scores_TV, tokens[1:], strict=True))
    found = perplexity(config.model_copy(update=CPU))
    assert found.nats == pytest.approx(wanted, rel=1e-5)


def test_bytes_are_those_of_all_tokens_but_the_first(folder: Path, tmp_path: Path):
    tokenizer: Any = load_model(folder / "target", "float32", "cpu").tokenizer
    text = "the cät sat"
    (tokens,) = read_documents(
        CorpusConfig(path=str(write_lines(tmp_path / "a.jsonl", {"text": text}))), tokenizer
    )
    first = tokenizer.decode(tokens[:1], skip_special_tokens=True)
    assert num_bytes_of(tokens, tokenizer) == len(text.encode()) - len(first.encode())
    pair = CorpusConfig(
        path=str(write_lines(tmp_path / "b.jsonl", {"prompt": "the cät", "completion": " sat"}))
    )
    assert read_documents(pair, tokenizer) == [tokens]


def test_text_without_a_token_to_predict_is_one_line(folder: Path, tmp_path: Path):
    corpus = write_lines(tmp_path / "a.jsonl", {"tokens": [5]})
    with pytest.raises(PromptError, match=r"a\.jsonl has no document of two tokens or more"):
        perplexity(small("perplexity", folder, tmp_path, text=str(corpus), **CPU))


no_weights = pytest.mark.usefixtures("no_weights")


@no_weights
def test_prompts_after_those_that_are_measured_are_not_read(folder: Path, tmp_path: Path):
    text = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) for prompt in ("a b", "c d e", "f")]
    text.write_text("\n".join([*lines, "not json"]))
    config = small("measure", folder, tmp_path / "out", prompts=str(text))
    config = config.model_copy(update={"num_prompts": 3})
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    expected = [tokenizer(prompt)["input_ids"] for prompt in ("a b", "c d e", "f")]
    assert config.read_prompts(tokenizer)[1] == expected


SERVED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": None}


@no_weights
@pytest.mark.parametrize("verb", ["measure", "analyze"])
def test_sampling_that_engines_take_from_the_model_is_noted_unless_it_is_chosen(
    folder: Path, tmp_path: Path, verb: str
):
    target = shutil.copytree(folder / "target", tmp_path / "target")
    config = small(verb, folder, tmp_path, prompts=str(folder / "corpus.jsonl"))
    values = config.model_dump(exclude_unset=True) | {"target": str(target)}
    edit(target / "generation_config.json", **SERVED)
    noted = "sets temperature=0.6, top_k=20, which .* as --temperature 0.6 --top-k 20$"
    with pytest.warns(InputNote, match=noted):
        validate(type(config), values).check(InputChecks())
    for changes, sampling in ({"do_sample": False}, {}), ({"do_sample": True}, {"temperature": 1}):
        edit(target / "generation_config.json", **changes)
        chosen = {"sampling": sampling} if sampling else {}
        with warnings.catch_warnings(record=True) as caught:
            validate(type(config), values | chosen).check(InputChecks())
        assert not [each for each in caught if "generation config" in str(each.message)]
