"""Tokens of answers that a server gives as text alone."""

import pytest

from paceline.data.answering import text_of, tokens_behind
from tokenizer_families import FAMILIES, wrapped

PROMPT, ANSWER = "def f(x):\n", "return y"


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("unigram", "pieces of words")]
)
def test_an_answer_has_no_space_that_the_server_did_not_write(family: str):
    plain = FAMILIES[family]()
    prompt, tokenizer = plain.encode(PROMPT).ids, wrapped(plain)
    before = plain.decode(prompt)
    found = tokens_behind(tokenizer, prompt, ANSWER)
    assert plain.decode(prompt + found) == before + ANSWER
    assert text_of(tokenizer, found, prompt) == ANSWER
    alone = plain.encode(ANSWER, add_special_tokens=False).ids
    assert (plain.decode(prompt + alone) == before + ANSWER) == (
        family in ("no space in front", "bytes")
    )


def test_an_answer_that_no_tokens_continue_with_is_said():
    plain = FAMILIES["pieces of words"]()
    prompt = plain.encode("the c").ids
    with pytest.warns(UserWarning, match="without its prompt: .* cannot go on with"):
        found = tokens_behind(wrapped(plain), prompt, "(")
    assert found == plain.encode("(").ids
