"""Completions have the tokens that `tokenizers` gives to prompt and completion together."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.data.prompts import Record
from paceline.data.tokens import encode, following_tokens, inner_tokens
from paceline.errors import PromptError

TEXT = ["the cat sat 123456 times, hello hello WORLD don't\n\n x = 5;   y"] * 20
# as the rule of Llama 3: a line break belongs to what follows it, three digits to a number
GROUPS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(rule: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule is not None:
        split = pre_tokenizers.Split(Regex(rule), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(tokenizer, trainers.BpeTrainer, vocab_size=330, initial_alphabet=alphabet)


def sentencepiece() -> Tokenizer:
    """A space in front of a text, and bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_])
    special = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    return trained(tokenizer, trainers.BpeTrainer, vocab_size=420, special_tokens=special)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    return trained(tokenizer, trainers.UnigramTrainer, vocab_size=100, **special)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return trained(tokenizer, trainers.WordPieceTrainer, vocab_size=120, special_tokens=["[UNK]"])


def trained(tokenizer: Tokenizer, trainer: Any, **settings: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXT, trainer(show_progress=False, **settings))
    return tokenizer


KINDS = {
    "byte level": byte_level(),
    "groups": byte_level(GROUPS),
    "sentencepiece": sentencepiece(),
    "unigram": unigram(),
    "word piece": word_piece(),
}
PAIRS = [
    ("2+2=", "4 cats"),
    ("the cat", " sat"),
    ("the cat ", "sat"),
    ("the c", "at sat"),
    ("a  ", "b"),
    ("x\n", "\ny"),
    ("WOR", "LD hello"),
    ("the c", "AT SAT"),
    ("日", "本語"),
    ("e", "\u0301 b"),
    ("don", "'t"),
    ("12", "345 2024"),
    ("🙂", "👍🏽"),
    ("x 👨", "\u200d👩"),
    ("a", "\ufffd b"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "text"), PAIRS)
def test_a_completion_has_the_tokens_of_the_whole_behind_those_of_the_prompt(
    kind: str, prompt: str, text: str
):
    plain = KINDS[kind]
    own, whole = plain.encode(prompt).ids, plain.encode(prompt + text).ids
    found = following_tokens(prompt, own, text, PreTrainedTokenizerFast(tokenizer_object=plain))
    if whole[: len(own)] == own:
        assert found == whole[len(own) :]
    else:  # a token crosses the border
        assert plain.decode(own + found) == plain.decode(whole)


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "tokens"),
    [
        ("sentencepiece", "2+2=", "4 cats", ["4", "▁", "cat", "s"]),
        ("byte level", "the cat ", "sat", ["sat"]),
        ("byte level", "the c", "at sat", ["at", "Ġsat"]),
        ("groups", "x\n", "\ny", ["Ċ", "y"]),
        ("word piece", "the c", "at sat", ["##at", "sat"]),
        ("word piece", "12", "345", ["##34", "##5"]),
    ],
)
def test_the_rest_of_a_token_that_crosses_the_border_is_the_middle_of_a_text(
    kind: str, prompt: str, text: str, tokens: list[str]
):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind])
    found = following_tokens(prompt, KINDS[kind].encode(prompt).ids, text, tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(found)
    if kind == "sentencepiece":
        assert pieces[0] == "4", "no space in front of it"
    else:
        assert pieces == tokens


def test_text_behind_tokens_gets_no_space_of_its_own():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS["sentencepiece"])
    prompt = KINDS["sentencepiece"].encode("2+2=").ids
    _, completion = encode(Record("row", "prompt", text=prompt, completion="4"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(completion) == ["4"]
    assert inner_tokens(prompt, "", tokenizer) == []


def test_a_rest_that_the_tokenizer_cannot_write_is_refused_with_its_place():
    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "c": 2, "cat": 3}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    with pytest.raises(PromptError, match=r"^row 7: .* cannot go on with 'at' .* a word ends"):
        encode(Record("row 7", "prompt", text="the c", completion="at"), tokenizer)
