"""Who may speculate with whom; Marian with a vocabulary for each language."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from paceline.core.sampling import SamplingParams
from paceline.data.prompts import Record
from paceline.data.tokens import turns
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import PromptError, UsageError, VocabularyMismatchError
from paceline.models import load_model, wrap_model
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from paceline.models.loading import load_tokenizer
from support.checkpoints import edit
from support.fakes import TableModel
from support.models import generated, tiny_hf, tiny_tokenizer

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


def translator(directory: Path, sizes: dict[str, int]) -> None:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, with more tokens in the texts, and `other`, with more in the sources."""
    folder = tmp_path_factory.mktemp("two")
    translator(folder / "model", SIZES)
    translator(folder / "other", OTHER_SIZES)
    return folder


@pytest.mark.parametrize(
    ("name", "size", "source"), [("model", 38, [5, 6, 7, 8, 0]), ("other", 34, [36, 5, 37, 0])]
)
def test_texts_are_those_of_generate_with_tokens_that_one_of_the_vocabularies_lacks(
    name: str, size: int, source: list[int], folder: Path
):
    model = load_model(folder / name, dtype="float32")
    assert model.vocab_size == size
    wanted = generated(model.hf, source, 12, num_beams=1, eos_token_id=None)
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=SamplingParams(temperature=0))
    (text,) = decoder.generate([source], 12, eos_token_ids=[])
    assert list(text.tokens) == wanted


def test_tokens_that_a_table_lacks_are_refused(folder: Path):
    model, other = (load_model(folder / name, dtype="float32") for name in ("model", "other"))
    assert model.vocab_size > len(model.tokenizer or ())
    with pytest.raises(PromptError, match="from 0 to 34, the vocabulary goes from 0 to 33"):
        AutoregressiveDecoder(model).generate([[34, 5, 0]], 4)
    with pytest.raises(UsageError, match=r"decoder_prompt \[35\]; wanted at least one .* below 34"):
        wrap_model(other.hf, decoder_prompt=[35])


def test_completions_have_tokens_of_the_target_language(folder: Path):
    tokenizer: Any = load_tokenizer(folder / "model")
    record = Record("a row", "prompt", "the cat", "der hund")
    (turn,) = turns(record, tokenizer, encoder=True)
    assert turn.prompt == tokenizer("the cat")["input_ids"]
    wanted = tokenizer(text_target="der hund")["input_ids"]
    assert (turn.completion or [])[: len(wanted) - 1] == wanted[:-1]
    assert tokenizer.decode(wanted, skip_special_tokens=True) == "der hund"


@pytest.mark.parametrize("name", ["model", "other"])
def test_token_ids_of_a_record_are_of_the_table_that_reads_them(folder: Path, name: str):
    """The encoder's for its prompt, the decoder's for its completion, by the sizes in the files."""
    last_source, last_target = (
        max(json.loads((folder / name / file).read_text()).values())
        for file in ("vocab.json", "target_vocab.json")
    )
    tokenizer = load_tokenizer(folder / name)
    (turn,) = turns(Record("a row", "prompt", [last_source], [last_target]), tokenizer)
    assert (turn.prompt, turn.completion) == ([last_source], [last_target])
    with pytest.raises(PromptError, match=f"token {last_source + 1}, .* last is {last_source};"):
        turns(Record("a row", "prompt", [last_source + 1], [5]), tokenizer)
    with pytest.raises(PromptError, match=f"token {last_target + 1}, .* last is {last_target};"):
        turns(Record("a row", "prompt", [5], [last_target + 1]), tokenizer)


@pytest.mark.parametrize("file", ["vocab.json", "target_vocab.json"])
def test_a_draft_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path, file: str):
    model = load_model(folder / "model", dtype="float32")
    assert model.tokenizer is not None
    assert check_same_vocabulary(model, model) == 38
    assert check_same_tokenizer(model.tokenizer, model) == 38
    changed = shutil.copytree(folder / "model", tmp_path / "changed")
    known = json.loads((changed / file).read_text())
    first, second = list(known)[5:7]
    edit(changed / file, **{first: known[second], second: known[first]})
    draft = load_model(changed, dtype="float32")
    with pytest.raises(VocabularyMismatchError, match="differ in 2 of"):
        check_same_vocabulary(model, draft)
    with pytest.raises(VocabularyMismatchError, match="differ in 2 of"):
        check_same_tokenizer(model.tokenizer, draft)


@pytest.mark.parametrize("sizes", [(266, 266), (320, 288)])
def test_one_tokenizer_passes_and_padded_logits_are_sliced_to_what_it_names(sizes: tuple[int, int]):
    models = [wrap_model(tiny_hf(vocab_size=size), tiny_tokenizer()) for size in sizes]
    assert check_same_vocabulary(*models) == 266


def test_other_numbers_for_the_same_tokens_are_counted_and_shown():
    target = wrap_model(tiny_hf(vocab_size=300), tiny_tokenizer(extra_tokens=("cat", "dog")))
    draft = wrap_model(tiny_hf(vocab_size=300), tiny_tokenizer(extra_tokens=("dog", "cow")))
    with pytest.raises(VocabularyMismatchError) as caught:
        check_same_vocabulary(target, draft)
    assert str(caught.value) == (
        "the tokenizers of target and draft differ in 3 of 269 entries, for example 'cat' is token "
        "266 in the target and missing in the draft; choose or build a draft with the target's own "
        "tokenizer"
    )


def test_logits_too_narrow_for_the_tokenizer_are_refused():
    target = wrap_model(tiny_hf(vocab_size=266), tiny_tokenizer())
    draft = wrap_model(tiny_hf(vocab_size=200), tiny_tokenizer())
    with pytest.raises(VocabularyMismatchError, match="266 tokens and the draft for 200"):
        check_same_vocabulary(target, draft)
    with pytest.raises(VocabularyMismatchError, match="200 tokens and the draft for 266"):
        check_same_vocabulary(draft, target)


def test_a_token_beyond_the_logits_is_the_same_in_one_tokenizer():
    tokenizer = tiny_tokenizer(extra_tokens=("<padding>",))
    draft = wrap_model(tiny_hf(vocab_size=266), tokenizer)
    assert check_same_tokenizer(tokenizer, draft) == check_same_vocabulary(draft, draft) == 266
    with pytest.raises(VocabularyMismatchError, match="differ in 1 of 267 entries"):
        check_same_tokenizer(tiny_tokenizer(), draft)


def test_without_tokenizers_only_equal_widths_pass():
    assert check_same_vocabulary(TableModel.random(5), TableModel.random(5, seed=1)) == 5
    with pytest.raises(VocabularyMismatchError, match="5 tokens and the draft for 6"):
        check_same_vocabulary(TableModel.random(5), TableModel.random(6))
