"""Tokenizers of GGUF files read as llama.cpp reads them.

llama.cpp gave all ids and stop tokens below, for these very files: the server of xllamacpp
2026.10.11549 (/tokenize with parse_special; the log for stop tokens).
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.models import load_model
from paceline.models.gguf.conversion import converted_gguf
from paceline.models.loading import load_tokenizer
from support.checkpoints import fails
from support.gguf_files import TEXTS, TOKENS, written

SPLITS = (  # by text: the ids that any rule gives
    (
        "256 6 82 290 6 50 220 296 299 22 220 304 220 3 18 13 281 283 87 63",
        "256 258 290 6 50 265 267 269 271 273 275 277 18 13 281 283 87 63",
        "256 258 290 6 50 220 16 17 18 19 20 21 22 273 275 277 18 13 16 19 283 87 63",
        "256 258 290 263 220 296 299 22 332 277 18 13 281 283 87 63",
        "256 258 290 263 220 16 17 18 19 20 21 22 273 275 277 18 13 16 19 283 87 63",
        "256 258 290 263 220 16 17 18 19 20 21 22 332 277 18 13 16 19 283 87 63",
    ),
    (
        "64 220 533 547 537 197 197 67 555",
        "64 220 533 535 220 537 197 540 555",
    ),
    (
        "87 629 631 16 634 636 636 639 88 62 89",
        "87 629 631 16 634 651 198 639 88 62 89",
        "87 659 16 691 639 88 642",
        "87 629 631 16 634 636 636 639 88 642",
        "87 659 16 714 88 642",
    ),
    (
        "748 750 752 788 757 759 795 83 765 767 803 772 774 776 812 778 6 82",
        "748 750 752 788 757 759 795 83 765 767 803 772 774 776 812 778 258",
        "977 826 830 933 1058 258",
        "748 750 752 788 757 759 761 763 765 767 803 772 774 776 812 778 258",
        "977 826 830 834 803 1058 258",
    ),
    (
        "1087 1089 1091 1125 1128 1099 1101 1103 1137 1107 1109 1111 11 1114 1116 1118",
        "1296 1305 1314 1268",
        "1087 1089 1091 1125 1096 1098 1100 1134 1096 1106 1108 1143 1113 1115 1150",
    ),
    (
        "68 1395 68 1395 1398 1400 1426 1429 1432 1435 1406 1412 1442 1413 1415",
        "68 1418 1395 1615 1519 1655",
        "68 1418 1395 1398 1400 1426 1429 1432 1435 1406 1412 1442 1413 1415",
    ),
    (
        "1678 1680 1682 1684 1686 1688 1690 1692 1694 1718 1698 86",
        "1763 1684 1841 1718 1721",
        "1678 1680 1682 1684 1686 1688 1690 1692 1694 1718 1721",
        "1678 1680 1682 1684 1841 1718 1721",
    ),
)
RULES = {  # by pre-tokenizer: which of them each text has; "": the key is missing
    "": (0, 0, 0, 0, 0, 0, 0),
    "gpt-2": (1, 0, 1, 1, 0, 0, 0),
    "smollm": (2, 0, 1, 1, 0, 0, 0),
    "llama-bpe": (3, 1, 2, 2, 1, 1, 1),
    "qwen2": (4, 1, 3, 3, 2, 2, 2),
    "tekken": (5, 1, 4, 4, 1, 1, 3),
}
CONTROL, USER_DEFINED, NORMAL, UNUSED = 3, 4, 1, 5  # types of tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def ids_of(path: Path, *texts: str) -> list[list[int]]:
    """Ids of transformers; those of tokenizers alone are the same."""
    tokenizer: Any = load_tokenizer(path)
    found = [tokenizer(text)["input_ids"] for text in texts]
    alone = Tokenizer.from_file(str(converted_gguf(path) / "tokenizer.json"))
    assert [alone.encode(text).ids for text in texts] == found
    return found


@pytest.mark.parametrize("pre", RULES)
def test_text_is_split_as_llama_cpp_splits_it(pre: str, tmp_path: Path):
    ends = {"bos_token_id": len(TOKENS), "add_bos_token": False}
    path = written(tmp_path / "a.gguf", pre=pre or None, **ends)
    chosen = zip(SPLITS, RULES[pre], strict=True)
    wanted = [[*map(int, splits[number].split())] for splits, number in chosen]
    assert ids_of(path, *TEXTS) == wanted


def test_rules_that_differ_split_differently():
    """Else the texts above would prove nothing."""
    assert len(set(RULES.values())) == len(RULES)


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        *(("pre", name, "pre-tokenizer") for name in ("kimi-k2", "deepseek-v3", "falcon", "new")),
        *(("tokenizer_model", name, "tokenizer of the kind") for name in ("t5", "plamo2")),
    ],
)
def test_a_tokenizer_without_a_rule_is_refused_by_its_name(
    key: str, name: str, said: str, tmp_path: Path
):
    fails(written(tmp_path / "a.gguf", **{key: name}), f"{said} '{name}'")


SPECIAL = {
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>": CONTROL,
    "<\uff5cend\u2581of\u2581sentence\uff5c>": CONTROL,
    "<\uff5cUser\uff5c>": CONTROL,
    "[größe]": CONTROL,
    "  \t": USER_DEFINED,
    "[плюс]": USER_DEFINED,
}


def test_each_special_token_is_its_own_id_and_none_is_added(tmp_path: Path):
    path = written(tmp_path / "a.gguf", special=SPECIAL)
    first = len(TOKENS)
    model = load_model(path)
    assert ids_of(path, *SPECIAL) == [[first + number] for number in range(len(SPECIAL))]
    assert ids_of(path, "[größe]e[плюс]  \t") == [
        [first + 3, TOKENS.index("e"), first + 5, first + 4]
    ]
    assert model.tokenizer is not None
    assert len(model.tokenizer) == model.vocab_size == first + len(SPECIAL)
    assert model.tokenizer.decode([first + 5]) == "[плюс]"
    shown = model.tokenizer.decode([first + 2, 5, first + 4], skip_special_tokens=True)
    assert shown == TOKENS[5] + "  \t"  # control tokens are no text, user-defined ones are


def test_rows_of_the_embedding_without_a_token_are_no_tokens(tmp_path: Path):
    padding = {f"[PAD{len(TOKENS) + number}]": UNUSED for number in (1, 2)}
    model = load_model(written(tmp_path / "a.gguf", special={"<|endoftext|>": CONTROL} | padding))
    assert (model.vocab_size, model.hf.config.vocab_size) == (len(TOKENS) + 1, len(TOKENS) + 3)


ENDS = {  # tokens, keys -> stop tokens by their places among the tokens
    "the key eot_token_id": ({"<e>": CONTROL, "<t>": CONTROL}, {"eot_token_id": 1}, (0, 1)),
    "the key eom_token_id": ({"<e>": CONTROL, "<m>": CONTROL}, {"eom_token_id": 1}, (0, 1)),
    "by their text": (
        {"<e>": CONTROL, "<|im_end|>": CONTROL, "<x>": CONTROL, "<end_of_turn>": CONTROL},
        {},
        (0, 1, 3),
    ),
    "by their text, typed as ordinary": ({"<e>": CONTROL, "<|eot_id|>": NORMAL}, {}, (0, 1)),
    "of infilling": (
        {
            "<e>": CONTROL,
            "<|file_sep|>": CONTROL,
            "<|fim_pad|>": CONTROL,
            "<|fim_middle|>": CONTROL,
        },
        {},
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_stop_tokens_are_those_of_llama_cpp(case: str, tmp_path: Path):
    special, keys, wanted = ENDS[case]
    first = len(TOKENS)
    keys = {name: first + number for name, number in keys.items()}
    model = load_model(written(tmp_path / "a.gguf", special=special, **keys))
    assert model.eos_token_ids == tuple(first + number for number in wanted)
    assert ids_of(tmp_path / "a.gguf", *special) == [[first + n] for n in range(len(special))]


def test_bos_and_eos_are_put_around_a_text_as_the_file_says(tmp_path: Path):
    first, special = len(TOKENS), {"<b>": CONTROL, "<e>": CONTROL}
    roles = {"special": special, "bos_token_id": first, "eos_token_id": first + 1}

    def ids(pre: str, **flags: bool) -> list[int]:
        return ids_of(written(tmp_path / f"{pre}{flags}.gguf", pre=pre, **roles, **flags), "IT")[0]

    text = ids("qwen2")
    assert text == ids("llama-bpe", add_bos_token=False)
    assert ids("qwen2", add_bos_token=True) == ids("llama-bpe") == [first, *text]
    assert ids("qwen2", add_bos_token=True, add_eos_token=True) == [first, *text, first + 1]
    fails(written(tmp_path / "none.gguf", add_bos_token=True), "add_bos_token")


def test_an_ordinary_token_that_pads_stays_ordinary(tmp_path: Path):
    model = load_model(written(tmp_path / "a.gguf", pad_token_id=0))
    assert model.tokenizer is not None
    assert model.hf.config.pad_token_id == 0
    assert model.tokenizer.decode([0, 1], skip_special_tokens=True) == TOKENS[0] + TOKENS[1]


def test_named_chat_templates_come_along(tmp_path: Path):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tokenizer = load_model(written(tmp_path / "a.gguf", chat_template=named)).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template == {"default": "A", "tool_use": "B"}
    single = load_model(written(tmp_path / "b.gguf", chat_template="A")).tokenizer
    assert single is not None
    assert single.chat_template == "A"


def test_an_id_beyond_the_tokens_is_none_as_in_llama_cpp(tmp_path: Path):
    model = load_model(written(tmp_path / "a.gguf", unk_token_id=99_999, eot_token_id=99_999))
    assert model.tokenizer is not None
    assert model.tokenizer.unk_token_id is None
    assert model.eos_token_ids == (len(TOKENS),)
