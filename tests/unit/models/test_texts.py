"""Texts of answers, chat templates and tokenizers: as `tokenizers` and transformers have them."""

import importlib
import json
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.decoders import DecodeStream
from tokenizers.models import WordLevel
from transformers import NllbTokenizer

from paceline.data.prompts import Record
from paceline.data.tokens import last_turn
from paceline.environment import begin
from paceline.errors import PromptError
from paceline.models.chat_text import chat_prompt
from paceline.models.loading import load_tokenizer
from paceline.models.token_text import AnswerStream, answer_text
from support.checkpoints import edit, fails
from support.models import tiny_tokenizer
from support.texts import TOKENIZER_FAMILIES, byte_level, spaces, unigram, word_piece, wrapped

PROMPT, ANSWER = "def f(x):\n", "    y = x\n    return y"
EMOJI = "a🎉é한b"
WITH_BYTES = [name for name in TOKENIZER_FAMILIES if name not in ("unigram", "pieces of words")]


def _wanted(plain: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    before, whole = plain.decode(prompt), plain.decode(prompt + answer)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("family", TOKENIZER_FAMILIES)
@pytest.mark.parametrize("bos", [False, True])
def test_an_answer_has_the_text_that_it_adds_to_the_prompt(family: str, bos: bool):
    plain = TOKENIZER_FAMILIES[family]()
    whole = plain.encode(PROMPT + ANSWER).ids
    tokenizer, front = wrapped(plain), [plain.token_to_id("<s>")] * bos
    for cut in range(1, len(whole)):
        prompt, answer = front + whole[:cut], whole[cut:]
        wanted = _wanted(plain, prompt, answer)
        assert answer_text(tokenizer, answer, prompt) == wanted
        stream = AnswerStream(tokenizer, prompt)
        assert "".join(map(stream.add, answer)) == wanted


@pytest.mark.parametrize("family", WITH_BYTES)
def test_characters_of_several_tokens_stream_when_they_are_complete(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    prompt = plain.encode("the cat").ids
    answer = plain.encode("the cat" + EMOJI).ids[len(prompt) :]
    assert plain.decode(prompt + answer) == plain.decode(prompt) + EMOJI
    ours, theirs = AnswerStream(wrapped(plain), prompt), DecodeStream(ids=prompt)
    pieces = [ours.add(token) for token in answer]
    assert pieces == [theirs.step(plain, token) or "" for token in answer]
    assert [piece for piece in pieces if piece] == list(EMOJI)
    at = pieces.index("🎉")
    assert pieces[at - 3 : at] == ["", "", ""]


@pytest.mark.parametrize("family", WITH_BYTES)
def test_a_prompt_that_ends_within_a_character_gives_the_whole_character(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    ids = plain.encode("the cat" + EMOJI).ids
    cut = ids.index(plain.encode("the cata").ids[-1]) + 3
    assert plain.decode(ids[:cut]).endswith("\N{REPLACEMENT CHARACTER}")
    assert answer_text(wrapped(plain), ids[cut:], ids[:cut]) == EMOJI[1:]
    stream = AnswerStream(wrapped(plain), ids[:cut])
    assert "".join(map(stream.add, ids[cut:])) == EMOJI[1:]


def test_special_tokens_are_left_out_and_keep_the_spaces_around_them():
    plain = spaces("first", 1)
    mark = plain.token_to_id("<s>")
    sat = next(
        n for token, n in plain.get_vocab().items() if token.startswith("▁") and len(token) > 1
    )
    word = " " + plain.decode([sat])
    tokenizer = wrapped(plain)
    prompt, answer = plain.encode("the cat").ids, [mark, sat, mark, sat]
    assert answer_text(tokenizer, answer, prompt) == word * 2
    stream = AnswerStream(tokenizer, prompt)
    assert [stream.add(token) for token in answer] == ["", word, "", word]
    assert (
        answer_text(tokenizer, answer, prompt, skip_special_tokens=False) == f"<s>{word}<s>{word}"
    )


def test_nothing_is_cleaned_up():
    plain = unigram()
    prompt = plain.encode("x").ids
    answer = plain.encode("x y , y").ids[len(prompt) :]
    tokenizer = wrapped(plain, clean_up_tokenization_spaces=True)
    assert tokenizer.decode(prompt + answer) == "x y, y"
    assert answer_text(tokenizer, answer, prompt) == " y , y"


def test_an_answer_behind_nothing_is_a_text_of_its_own():
    plain = spaces("first", 1)
    ids = plain.encode("the cat").ids
    assert answer_text(wrapped(plain), ids, []) == "the cat"
    assert answer_text(wrapped(plain), ids, [plain.token_to_id("<s>")]) == "the cat"


def chat(*contents: str, **arguments: Any) -> Record:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return Record("row 1", "chat", messages=tuple(messages), template_kwargs=arguments)


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ " + "(" * 5000 + "1", "maximum recursion depth"),
        ("{{ 'a' * 10 ** 18 }}", "MemoryError"),
        ("{{ raise_exception('no\nsystem message') }}", "no system message"),
    ],
    ids=range(4),
)
def test_a_template_that_fails_is_one_line(template: str, said: str):
    with pytest.raises(PromptError, match=f"row 1 does not fit the chat template.*{said}"):
        chat_prompt(chat("hi", "ho", "hu"), with_template(template))


def test_a_template_that_was_changed_renders_as_it_is_now():
    tokenizer = with_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert chat_prompt(chat("hi"), tokenizer) == "<user>hi"
    tokenizer.chat_template = "{{ bos_token }}"
    tokenizer.bos_token = "<pad>"
    assert chat_prompt(chat("hi"), tokenizer) == "<pad>"


def test_a_generation_block_is_rendered():
    block = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    good = "{% for m in messages %}" + block + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = with_template(good)
    assert tokenizer.decode(last_turn(chat("hi", "ho"), tokenizer).completion) == "ho"


def test_a_template_gets_the_day_of_the_run_or_the_one_that_is_given():
    """What transformers makes of the same day as a text, as templates of Llama 3.2 take it."""
    unset = "{% set date_string = strftime_now('%d %b %Y') %}"
    tokenizer = with_template("{% if not date_string is defined %}" + unset + "{% endif %}")
    tokenizer.chat_template += "Today Date: {{ date_string }}"
    messages = [{"role": "user", "content": "hi"}]

    def told(**day: str) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **day)

    with begin({"environment": {"began": "2025-02-03 23:59:59"}}):
        with begin():  # a run in a run
            assert chat_prompt(chat("hi"), tokenizer) == told(date_string="03 Feb 2025")
        given = chat_prompt(chat("hi", strftime_now="2024-07-26"), tokenizer)
        assert given == told(date_string="26 Jul 2024")
    assert chat_prompt(chat("hi"), tokenizer) == told()


TEXTS = (
    "total 123456 in 2024",
    "don't  DON'T\n\n  x",
    "e\u0301 é \uff37",
    "A<s>b <s> c",
    "  lead",
    "",
)
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|."
TOKENS = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<unk>"}


def _bytes(*parts: Any) -> Tokenizer:
    plain = byte_level(prefix=False)
    byte_part = pre.ByteLevel(add_prefix_space=False, use_regex=not parts)
    plain.pre_tokenizer = pre.Sequence([*parts, byte_part])
    return plain


def _digits() -> Tokenizer:
    return _bytes(pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False))


def _llama_3() -> Tokenizer:
    return _bytes(pre.Split(Regex(LLAMA_3), "isolated"))


def _llama_2() -> Tokenizer:
    found = json.loads(spaces("first", 1).to_str()) | {"pre_tokenizer": None}
    plain = Tokenizer.from_str(json.dumps(found))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    plain.normalizer = normalizers.Sequence(steps)
    return plain


def _lower(plain: Tokenizer) -> Tokenizer:
    plain.normalizer = normalizers.Lowercase()
    return plain


WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "digits, GPT-2": ("llama", _digits, {"tokenizer_class": "GPT2Tokenizer"}),
    "Llama 3, by model type": ("qwen2", _llama_3, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "a normalizer": ("llama", lambda: _lower(_bytes()), {"tokenizer_class": "GPT2Tokenizer"}),
    "Llama 2": ("llama", _llama_2, {"tokenizer_class": "LlamaTokenizer"}),
    "T5": ("t5", lambda: _lower(unigram()), {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}),
    "cased": ("bert", word_piece, {"tokenizer_class": "BertTokenizer"}),
}
RIGHT: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "GPT-2": ("gpt2", lambda: byte_level(prefix=False), {"tokenizer_class": "GPT2Tokenizer"}),
    "Llama": ("llama", lambda: spaces("first", 1), {"tokenizer_class": "LlamaTokenizer"}),
    "no class": ("llama", _digits, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "unknown class": ("llama", _digits, {"tokenizer_class": "NoSuchTokenizer"}),
}


def _directory(folder: Path, model_type: str, plain: Tokenizer | None, settings: Any) -> Path:
    size = 500 if plain is None else plain.get_vocab_size()
    if plain is not None:
        plain.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


load_alone = partial(load_tokenizer, alone=True)


def _load(folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokenizer = load_alone(folder)
    return tokenizer, [str(each.message) for each in found]


def _assert_reads(tokenizer: Any, plain: Tokenizer) -> None:
    for text in TEXTS:
        ids = plain.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert found == plain.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_the_ids_are_those_of_tokenizer_json_whatever_the_class_makes_of_it(
    name: str, tmp_path: Path
):
    model_type, make, settings = (WRONG | RIGHT)[name]
    plain = make()
    tokenizer, said = _load(_directory(tmp_path, model_type, plain, settings | TOKENS))
    _assert_reads(tokenizer, plain)
    assert tokenizer.eos_token == "<s>"
    if name in RIGHT:
        assert said == []
    else:
        assert re.search("transformers' .* than tokenizer.json; tokenizer.json is used", said[0])


def test_special_tokens_that_only_the_class_knows_are_kept(tmp_path: Path):
    """GPT-2's own tokenizer_config.json names no token, and its class knows the end of text."""
    plain = _digits()
    plain.add_special_tokens(["<|endoftext|>"])
    tokenizer, _ = _load(_directory(tmp_path, "gpt2", plain, {"tokenizer_class": "GPT2Tokenizer"}))
    _assert_reads(tokenizer, plain)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == plain.token_to_id("<|endoftext|>")


def test_a_class_that_cannot_be_built_leaves_the_file(tmp_path: Path):
    plain = _digits()
    settings = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}} | TOKENS
    (tmp_path / "code.py").write_text("raise SystemExit")
    with pytest.warns(UserWarning, match="cannot build the tokenizer's class"):
        tokenizer = load_alone(_directory(tmp_path, "llama", plain, settings))
    _assert_reads(tokenizer, plain)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "BertTokenizer"])
def test_a_tokenizer_without_a_vocabulary_is_refused(name: str, tmp_path: Path):
    _directory(tmp_path, "llama", None, {"tokenizer_class": name})
    fails(tmp_path, "no file with the tokenizer's vocabulary", load=load_alone)


@pytest.mark.parametrize("words", ["NOTE_ON_60 NOTE_OFF_60", "ACGT TTAG", "7 8 9", "\u6771 \u4eac"])
def test_a_vocabulary_of_other_words_than_english_is_read(words: str, tmp_path: Path):
    known = {token: at for at, token in enumerate(["<unk>", "<s>", *words.split()])}
    plain = Tokenizer(WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre.WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | TOKENS
    tokenizer = load_alone(_directory(tmp_path, "llama", plain, settings))
    assert tokenizer(words)["input_ids"] == plain.encode(words).ids == [2, 3, 4][: len(known) - 2]


@pytest.mark.parametrize("language", ["eng_Latn", "deu_Latn"])
def test_the_source_language_is_that_of_the_directory(tmp_path: Path, language: str):
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>"])}
    vocabulary |= {"▁": 4, "a": 5, "b": 6}
    NllbTokenizer(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    edit(tmp_path / "tokenizer_config.json", src_lang=language)
    found: Any = load_alone(tmp_path)
    wanted = [language, "▁", "a", "▁", "b", "</s>"]
    assert found.convert_ids_to_tokens(found("a b").input_ids) == wanted


def test_mistral_common_does_not_replace_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers takes it where it is installed, as with vLLM, if there is a tekken.json."""
    auto: Any = importlib.import_module("transformers.models.auto.tokenization_auto")
    theirs = SimpleNamespace(__name__="MistralCommonBackend", from_pretrained=lambda *_, **__: None)
    classes = auto.tokenizer_class_from_name
    for name, stub in {
        "_use_mistral_format": lambda *_, mistral_format=None, **__: mistral_format is None,
        "tokenizer_class_from_name": lambda name: theirs if "Common" in name else classes(name),
        "TOKENIZER_MAPPING_NAMES": auto.TOKENIZER_MAPPING_NAMES | {"mistral": theirs.__name__},
    }.items():
        monkeypatch.setattr(auto, name, stub)
    plain = _llama_3()
    folder = _directory(tmp_path, "mistral", plain, {"tokenizer_class": "LlamaTokenizer"} | TOKENS)
    (folder / "tekken.json").write_text("{}")
    tokenizer, said = _load(folder)
    _assert_reads(tokenizer, plain)
    assert not any("cannot build the tokenizer's class" in message for message in said)
