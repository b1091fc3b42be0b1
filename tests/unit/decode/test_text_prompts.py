"""Texts and chats as prompts, against `generate` of transformers with the same tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.decode import (
    AutoregressiveDecoder,
    Generation,
    SpeculativeDecoder,
)
from paceline.errors import PromptError
from paceline.models import HfModel
from support.models import tiny_model, tiny_pair

TEXTS = ["Once upon the time", "a", "In the end,\nthen"]
CHATS = [
    [{"role": "user", "content": "Is there a tin?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "then?"},
    ],
]
TEMPLATES = Path(__file__).parents[2] / "support" / "chat_templates"
NEW = 12
GREEDY = SamplingParams(temperature=0)


def of_transformers(model: HfModel, **inputs: Any) -> str:
    """The greedy continuation."""
    hf: Any = model.hf
    (whole,) = hf.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=2)
    start = 1 if hf.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    tokenizer: Any = model.tokenizer
    return tokenizer.decode(whole[start:], skip_special_tokens=True)


def decoders(*pair: HfModel) -> list[AutoregressiveDecoder | SpeculativeDecoder]:
    return [AutoregressiveDecoder(pair[0], GREEDY), SpeculativeDecoder(*pair, None, 3, GREEDY)]


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_text_is_continued_as_transformers_continues_it(architecture: str):
    target, draft = tiny_pair(architecture)
    tokenizer: Any = target.tokenizer
    wanted = [of_transformers(target, **tokenizer(text, return_tensors="pt")) for text in TEXTS]
    assert len(set(wanted)) > 1
    for decoder in decoders(target, draft):
        assert [decoder.generate(text, NEW).text for text in TEXTS] == wanted
        assert [found.text for found in decoder.generate(TEXTS, NEW)] == wanted


def test_a_chat_is_answered_as_transformers_answers_it():
    target, draft = tiny_pair(max_position_embeddings=256)
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text("utf-8")
    wanted = [
        of_transformers(
            target,
            **tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ),
        )
        for chat in CHATS
    ]
    for decoder in decoders(target, draft):
        assert [decoder.generate(chat, NEW).text for chat in CHATS] == wanted
        assert [found.text for found in decoder.generate(CHATS, NEW)] == wanted


def test_texts_are_drawn_as_their_tokens_are_and_tokens_give_what_they_gave():
    target, draft = tiny_pair()
    tokenizer: Any = target.tokenizer
    decoder = SpeculativeDecoder(target, draft, gamma=3)
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    for seed in (0, [5, 5, 9]):
        plain, found = decoder.generate(tokens, NEW, seed), decoder.generate(TEXTS, NEW, seed)
        assert [type(one) for one in plain] == [Generation] * 3
        assert [(one.tokens, one.stop_reason, one.stats) for one in plain] == [
            (one.tokens, one.stop_reason, one.stats) for one in found
        ]


@pytest.mark.parametrize("seed", range(4))
def test_streamed_pieces_are_the_text_with_the_source_of_each_token(seed: int):
    decoder = SpeculativeDecoder(*tiny_pair(), gamma=3)
    tokenizer: Any = decoder.target.tokenizer
    pieces = list(decoder.stream(TEXTS[0], NEW, seed))
    blocks = list(decoder.stream(tokenizer(TEXTS[0])["input_ids"], NEW, seed))
    assert [(piece.token, piece.source) for piece in pieces] == [
        pair for block in blocks for pair in zip(block.tokens, block.sources, strict=True)
    ]
    assert [piece.block for piece in pieces] == [block for block in blocks for _ in block.tokens]
    whole = tokenizer.decode([piece.token for piece in pieces], skip_special_tokens=True)
    streamed = "".join(piece.text for piece in pieces)
    assert streamed
    assert whole.startswith(streamed)
    assert set(whole[len(streamed) :]) <= {"\N{REPLACEMENT CHARACTER}"}  # no whole character
    found = decoder.generate(TEXTS[0], NEW, seed)
    assert (found.text, found.pieces) == (whole, tuple(pieces))


def test_what_is_no_prompt_or_cannot_be_one_is_refused_in_one_line():
    target, draft = tiny_pair()
    tokenizer: Any = target.tokenizer
    decoder = SpeculativeDecoder(target, draft, gamma=2)
    (user,) = CHATS[0]
    answer = {"role": "assistant", "content": "hello"}
    for said, prompts in [
        ("must be a list of texts, chats or lists of token ids", tokenizer("the")),
        ("must be a list of texts, chats or lists of token ids", user),
        ("prompt 1 is 3; give a list of texts, chats or lists of token ids", ["the", 3]),
        ("the prompt is a chat, but the tokenizer has no chat template", [user]),
        ("prompt 1 ends with the assistant's message", ["the", [user, answer]]),
        ("wanted role and content as strings", [{"a": 1}]),
        ("the prompt has no tokens", ""),
        ("half of a UTF-16 pair", "\ud800"),
    ]:
        given: Any = prompts
        with pytest.raises(PromptError) as raised:
            decoder.generate(given, 3)
        assert said in str(raised.value)


def test_a_model_without_a_tokenizer_takes_no_text():
    decoder = AutoregressiveDecoder(tiny_model())
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(PromptError, match=r"^the prompt is 'Once', but the target has no"):
            call("Once")
