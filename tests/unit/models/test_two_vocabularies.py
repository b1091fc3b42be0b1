"""Marian with a vocabulary for each language: prompts have tokens of one, texts of the other."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.prompts import Record
from paceline.data.tokens import turns
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import PromptError, UsageError, VocabularyMismatchError
from paceline.models import HfModel, load_model, wrap_model
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from support.models import tiny_hf

LINES = ["the cat sat on the mat and the dog", "hello world this is a test"]
LINES += ["der hund und die katze sitzen hier", "ein test der welt hallo"]
SIZES = {"source": 34, "target": 38}
OTHER_SIZES = {"source": 38, "target": 34}

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


def vocabularies(directory: Path, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Trained pieces of both languages, in the files of Marian."""
    found: dict[str, dict[str, int]] = {}
    text = directory / "text"
    text.write_text("\n".join(LINES * 20))
    for name, size in sizes.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(directory / name), vocab_size=size, minloglevel=5
        )
        (directory / f"{name}.model").rename(directory / f"{name}.spm")
        processor: Any = sentencepiece.SentencePieceProcessor(
            model_file=str(directory / f"{name}.spm")
        )
        pieces = [processor.id_to_piece(number) for number in range(len(processor))]
        special = ("</s>", "<unk>", "<s>")
        tokens = ["</s>", "<unk>", *(piece for piece in pieces if piece not in special), "<pad>"]
        found[name] = {token: number for number, token in enumerate(tokens)}
    return found


def translator(directory: Path, sizes: dict[str, int] = SIZES) -> Path:
    directory.mkdir()
    found = vocabularies(directory, sizes)
    (directory / "vocab.json").write_text(json.dumps(found["source"]))
    (directory / "target_vocab.json").write_text(json.dumps(found["target"]))
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True}
    settings |= {"source_lang": "en", "target_lang": "de", "eos_token": "</s>"}
    settings |= {"unk_token": "<unk>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    first, last = len(found["source"]), min(map(len, found.values())) - 1
    ids = {"decoder_start_token_id": last, "pad_token_id": last, "eos_token_id": 0}
    hf = tiny_hf(
        "marian",
        seed=3,
        vocab_size=first,
        decoder_vocab_size=len(found["target"]),
        share_encoder_decoder_embeddings=False,
        **ids,
    )
    hf.save_pretrained(directory)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> HfModel:
    return load_model(translator(tmp_path / "model"), dtype="float32")


def test_texts_are_those_of_generate_with_tokens_beyond_the_source_vocabulary(model: HfModel):
    assert model.vocab_size == 38 > len(model.tokenizer or ())
    check_greedy(model, [5, 6, 7, 8, 0])


def test_sources_have_tokens_beyond_the_target_vocabulary(tmp_path: Path):
    model = load_model(translator(tmp_path / "model", OTHER_SIZES), dtype="float32")
    assert model.vocab_size == 34
    check_greedy(model, [36, 5, 37, 0])


def test_tokens_that_a_table_lacks_are_refused(model: HfModel, tmp_path: Path):
    with pytest.raises(PromptError, match="from 0 to 34, the vocabulary goes from 0 to 33"):
        AutoregressiveDecoder(model).generate([[34, 5, 0]], 4)
    hf = load_model(translator(tmp_path / "other", OTHER_SIZES), dtype="float32").hf
    with pytest.raises(UsageError, match=r"decoder_prompt \[35\]; wanted at least one .* below 34"):
        wrap_model(hf, decoder_prompt=[35])


def check_greedy(model: HfModel, source: list[int]) -> None:
    """The text of this source is that of transformers."""
    hf: Any = model.hf
    wanted = hf.generate(
        torch.tensor([source]), max_new_tokens=12, do_sample=False, num_beams=1, eos_token_id=None
    )[0, 1:].tolist()
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=SamplingParams(temperature=0))
    (text,) = decoder.generate([source], 12, eos_token_ids=[])
    assert list(text.tokens) == wanted


def test_completions_have_tokens_of_the_target_language(model: HfModel):
    tokenizer: Any = model.tokenizer
    record = Record("a row", "prompt", "the cat", "der hund")
    (turn,) = turns(record, tokenizer, encoder=True)
    assert turn.prompt == tokenizer("the cat")["input_ids"]
    wanted = tokenizer(text_target="der hund")["input_ids"]
    assert (turn.completion or [])[: len(wanted) - 1] == wanted[:-1]
    assert tokenizer.decode(wanted, skip_special_tokens=True) == "der hund"


@pytest.mark.parametrize("file", ["vocab.json", "target_vocab.json"])
def test_a_draft_with_another_vocabulary_is_refused(model: HfModel, tmp_path: Path, file: str):
    assert model.tokenizer is not None
    assert check_same_vocabulary(model, model) == 38
    assert check_same_tokenizer(model.tokenizer, model) == 38
    other = translator(tmp_path / "other")
    known = json.loads((other / file).read_text())
    names = list(known)
    swapped = names[5], names[6]
    known[swapped[0]], known[swapped[1]] = known[swapped[1]], known[swapped[0]]
    (other / file).write_text(json.dumps(known))
    draft = load_model(other, dtype="float32")
    with pytest.raises(VocabularyMismatchError, match="differ in 2 of"):
        check_same_vocabulary(model, draft)
    with pytest.raises(VocabularyMismatchError, match="differ in 2 of"):
        check_same_tokenizer(model.tokenizer, draft)
