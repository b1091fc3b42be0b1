"""Encoder-decoders: greedy text is that of transformers, and batches, drafts and streams agree."""

from collections import Counter
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from paceline.core.rules import Chow, Lenient, Lossless
from paceline.core.sampling import SamplingParams
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.errors import ContextLengthError, UsageError
from paceline.models import HfModel, prepare_for_decoding, wrap_model
from paceline.models.compatibility import check_same_vocabulary
from support.models import tiny_hf, tiny_model

GREEDY = SamplingParams(temperature=0)
NEW = 16


@cache
def sources() -> list[list[int]]:
    """Twenty ragged encoder inputs of 1 to 14 tokens."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 15, (20,), generator=rng).tolist()
    return [torch.randint(3, 61, (length,), generator=rng).tolist() for length in lengths]


@cache
def models(architecture: str) -> tuple[HfModel, HfModel]:
    """A target, and a draft with a smaller encoder and decoder and another width."""
    sizes = {
        "t5": {"num_layers": 2, "num_decoder_layers": 1, "d_model": 24, "d_ff": 32},
        "bart": {"encoder_layers": 1, "decoder_layers": 2, "d_model": 24, "encoder_ffn_dim": 16},
    }
    kind = "t5" if "t5" in architecture else "bart"
    return tiny_model(architecture), tiny_model(architecture, seed=1, **sizes[kind])


def generate(hf: Any, *together: list[int], **options: Any) -> list[list[int]]:
    """The new tokens of transformers' generate, without what the decoder begins with.

    Sources of one length: nothing is padded but what follows the end of a text.
    """
    given = torch.tensor(together)
    written = hf.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **options)
    texts = written[:, 1:].tolist()
    return [text[: text.index(1) + 1] if 1 in text else text for text in texts]


def generate_all(hf: Any) -> list[list[int]]:
    """What transformers writes for every source."""
    texts: dict[int, list[int]] = {}
    for length in {len(source) for source in sources()}:
        rows = [row for row, source in enumerate(sources()) if len(source) == length]
        found = generate(hf, *(sources()[row] for row in rows), max_new_tokens=NEW)
        texts |= zip(rows, found, strict=True)
    return [texts[row] for row in range(len(texts))]


@cache
def wanted(architecture: str) -> list[list[int]]:
    return generate_all(models(architecture)[0].hf)


def tokens(decoder: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [one.tokens for one in decoder.generate(prompts, NEW, **options)]


@pytest.mark.parametrize(
    ("architecture", "batch_size", "gamma"),
    [
        *product(["t5", "t5_v1_1", "bart", "marian"], [1], [5]),
        *product(["t5_v1_1", "bart"], [4], [1]),
        # these share their decoder code with T5 and BART
        *product(["umt5", "mbart", "pegasus"], [4], [5]),
    ],
)
def test_greedy_text_is_that_of_transformers(architecture: str, batch_size: int, gamma: int):
    """Single rows are read by prepared models, batches by transformers' own pass."""
    target, draft = models(architecture)
    if batch_size == 1:
        target, draft = prepare_for_decoding(target), prepare_for_decoding(draft)
    decoder = SpeculativeDecoder(target, draft, gamma=gamma, sampling=GREEDY)
    assert tokens(decoder, sources(), batch_size=batch_size) == wanted(architecture)
    assert len({tuple(text) for text in wanted(architecture)}) >= 6, "else it would prove little"


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_plain_decoding_is_that_of_transformers(architecture: str):
    decoder = AutoregressiveDecoder(models(architecture)[0], GREEDY)
    assert tokens(decoder, sources(), batch_size=4) == wanted(architecture)


COOL = SamplingParams(temperature=0.8, repetition_penalty=1.2)
DECODERS: dict[str, Any] = {
    "plain": lambda target, _draft: AutoregressiveDecoder(target, COOL),
    "lossless": lambda *pair: SpeculativeDecoder(*pair, Lossless(), 3, COOL),
    "chow": lambda *pair: SpeculativeDecoder(*pair, Chow(0.5), 3, COOL),
    "lenient": lambda *pair: SpeculativeDecoder(*pair, Lenient("linear", 0.3), 3, COOL),
    "token cascade": lambda *pair: TokenCascade(*pair, 0.6, COOL),
    "big little": lambda *pair: BigLittleDecoder(*pair, 0.3, 3.0, COOL),
    "sequence cascade": lambda *pair: SequenceCascade(*pair, 0.9, COOL, normalise=True),
    "oracle": lambda *pair: OracleCascade(*pair, Chow(0.5), COOL),
}


@pytest.mark.parametrize(
    ("name", "architecture"), [*zip(DECODERS, cycle(["t5_v1_1", "bart"]), strict=False)]
)
def test_a_text_depends_on_its_own_source_and_seed_alone(architecture: str, name: str):
    decoder, prompts = DECODERS[name](*models(architecture)), sources()[:5]
    together = tokens(decoder, prompts, seed=5, batch_size=3)
    alone = [tokens(decoder, [prompt], seed=5 + row)[0] for row, prompt in enumerate(prompts)]
    assert together == alone
    blocks = decoder.stream(prompts[2], NEW, 7)
    assert [token for block in blocks for token in block.tokens] == alone[2]


def test_a_penalty_looks_at_decoder_text_alone_as_transformers_does():
    """The sources hold every token, so a penalty on them would change the text."""
    hf = models("t5_v1_1")[0].hf
    penalised = GREEDY.model_copy(update={"repetition_penalty": 1.5})
    prompts = [list(range(3, 61)), [9, 8, 7]]
    got = tokens(SpeculativeDecoder(*models("t5_v1_1"), gamma=3, sampling=penalised), prompts)
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.5}
    assert got == [generate(hf, prompt, **options)[0] for prompt in prompts]


@pytest.mark.parametrize("architecture", ["t5_v1_1", "bart"])
def test_forced_tokens_are_those_of_transformers(architecture: str):
    forced = {"forced_bos_token_id": 17, "forced_eos_token_id": 1}
    hf, small = (tiny_hf(architecture, seed=seed, **forced) for seed in (0, 1))
    for each in (hf, small):
        for name, value in forced.items():
            setattr(each.generation_config, name, value)
    target, draft = wrap_model(hf), wrap_model(small)
    assert target.decoder_prompt == (2, 17)
    decoder = SpeculativeDecoder(target, draft, gamma=3, sampling=GREEDY)
    for prompt in sources()[:6]:
        # transformers counts the forced first token
        (text,) = generate(hf, prompt, max_new_tokens=NEW + 1)
        assert text[0] == 17
        assert tokens(decoder, [prompt])[0] == text[1:]
        assert text[-1] == 1


def test_a_forced_token_does_not_lower_the_probability_of_a_response():
    """One token, which is forced, has probability 1: a cascade that keeps only such responses."""
    small = tiny_hf("bart", seed=1, forced_eos_token_id=1)
    small.generation_config.forced_eos_token_id = 1  # pyright: ignore
    draft = wrap_model(small)
    (found,) = SequenceCascade(draft, draft, alpha=0.0).generate([[5, 6]], 1)
    assert (found.tokens, found.stats.num_kept, found.stats.num_deferred) == ([1], 1, 0)
    (longer,) = SequenceCascade(draft, draft, alpha=0.0).generate([[5, 6]], 2)
    assert longer.stats.num_kept == 0, "the first token is sampled"


def test_what_cannot_be_used_is_one_line():
    t5, gpt = tiny_model("t5"), tiny_model("llama")
    with pytest.raises(UsageError, match="target is an encoder-decoder and the draft is decoder"):
        check_same_vocabulary(t5, gpt)
    with pytest.raises(UsageError, match="target is decoder-only and the draft is an encoder-dec"):
        SpeculativeDecoder(gpt, t5)
    other = wrap_model(tiny_hf("t5"), decoder_prompt=[5])
    with pytest.raises(UsageError, match=r"begins with the tokens \[2\] and that of the draft"):
        SpeculativeDecoder(t5, other)
    with pytest.raises(UsageError, match=r"got decoder_prompt \[5\], but llama is decoder-only"):
        wrap_model(tiny_hf("llama"), decoder_prompt=[5])
    with pytest.raises(UsageError, match=r"got decoder_prompt \[61\]; wanted .* below 61"):
        wrap_model(tiny_hf("t5"), decoder_prompt=[61])
    short = tiny_model("bart", max_position_embeddings=8)
    with pytest.raises(ContextLengthError, match="the prompt has 9 tokens and the encoder holds 8"):
        AutoregressiveDecoder(short).generate([[5] * 9], 2)
    with pytest.raises(UsageError, match="has no decoder_start_token_id; set it in its config"):
        wrap_model(tiny_hf("t5", decoder_start_token_id=None))


def banning(architecture: str, **options: Any) -> Any:
    """A model that may not emit the tokens it emits most often."""
    hf = tiny_hf(architecture, **options)
    hf.generation_config.bad_words_ids = [[token] for token in usual_tokens(architecture)[:2]]  # pyright: ignore
    hf.generation_config.suppress_tokens = usual_tokens(architecture)[2:3]  # pyright: ignore
    return hf


@cache
def usual_tokens(architecture: str) -> list[int]:
    found = Counter(token for text in wanted(architecture) for token in text if token != 1)
    return [token for token, _ in found.most_common(3)]


@pytest.mark.parametrize("architecture", ["t5_v1_1", "marian"])
def test_training_and_sessions_ban_the_same_tokens(architecture: str):
    target = wrap_model(banning(architecture))
    session = target.start_session()
    session.prefill([[5, 6, 7]])
    logits_V = session.extend(torch.tensor([[8]]))[0, 0]
    with torch.no_grad():
        hidden_TD = target.hidden(target.trial_batch([8], [5, 6, 7]))[0]
    log_probs_V = target.head.log_probs(hidden_TD)[-1]
    torch.testing.assert_close(log_probs_V.exp(), logits_V.softmax(-1), atol=1e-6, rtol=1e-5)
    banned = usual_tokens(architecture)
    assert bool((log_probs_V[banned].exp() == 0).all())
    assert bool(log_probs_V.isfinite().all()), "a divergence multiplies 0 by the logarithm"


def test_the_end_of_a_text_cannot_be_banned_as_a_bad_word():
    hf = tiny_hf("marian")
    hf.generation_config.bad_words_ids = [[1], [2]]  # pyright: ignore
    hf.generation_config.suppress_tokens = [-1, 10**6]  # pyright: ignore
    model: Any = wrap_model(hf)
    assert model.eos_token_ids == (1,)
    assert model.banned_K.tolist() == [2]


def test_text_ends_where_the_decoders_context_ends():
    target = tiny_model("bart", max_position_embeddings=8)
    (text,) = AutoregressiveDecoder(target).generate([[5] * 8], 20, eos_token_ids=[])
    assert (len(text.tokens), text.stop_reason) == (7, "context")
