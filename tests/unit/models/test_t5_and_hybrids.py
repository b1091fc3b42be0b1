"""Fused T5 passes, training and scores of models with states: against transformers' plain pass."""

from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow, collate
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import SlowerWarning
from paceline.measure.acceptance import forced_logits
from paceline.measure.perplexity import document_nats
from paceline.models import HfModel, prepare_for_decoding, t5, wrap_model
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.prepare import training_writer
from paceline.models.t5 import T5Pass
from support.models import HYBRIDS, tiny_hf, tiny_model

T5_LIKE = ["t5", "t5_v1_1", "umt5"]  # mt5 is t5_v1_1 by another name
SOURCES = [[5, 9, 12, 40, 33, 8, 7], [30], [4, 17, 22]]


def fused(architecture: str, draft_vocabulary: torch.Tensor | None = None) -> HfModel:
    hf = tiny_hf(architecture)
    decoder = T5Pass(hf, draft_vocabulary)
    return wrap_model(hf, draft_vocabulary=draft_vocabulary).decoding_with(decoder)


def logits_of(model: HfModel, text_BN: torch.Tensor) -> torch.Tensor:
    session = model.start_session()
    session.prefill(SOURCES)
    return session.extend(text_BN)


def long_text() -> torch.Tensor:
    return torch.randint(3, 61, (len(SOURCES), 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("architecture", T5_LIKE)
def test_logits_and_states_of_a_text_longer_than_the_first_table_of_distances(
    architecture: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(t5, "_DISTANCES", 4)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for model in (tiny_model(architecture), fused(architecture)):
        with recorded_hidden_states(model) as recorded:
            logits = logits_of(model, long_text())
        found.append((logits, recorded[-1]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=3e-5)


def test_only_tokens_of_the_draft_vocabulary_have_logits():
    allowed = torch.tensor([7, 1, 30])
    whole, part = fused("t5_v1_1"), fused("t5_v1_1", allowed)
    wanted, got = (logits_of(model, long_text()) for model in (whole, part))
    torch.testing.assert_close(got[..., allowed], wanted[..., allowed])
    assert (got != -torch.inf).sum() == got[..., allowed].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", [*T5_LIKE, "mt5"])
def test_prepared_models_use_it_and_speculate_losslessly(architecture: str, dtype: torch.dtype):
    pair: list[Any] = [tiny_hf(architecture, seed=seed) for seed in (0, 1)]
    target, draft = (prepare_for_decoding(wrap_model(hf.bfloat16().to(dtype))) for hf in pair)
    assert isinstance(target.decoder, T5Pass)
    greedy = SamplingParams(temperature=0)
    plain = AutoregressiveDecoder(target, greedy).generate(SOURCES, 12)
    ours = SpeculativeDecoder(target, draft, gamma=3, sampling=greedy).generate(SOURCES, 12)
    assert [one.tokens for one in ours] == [one.tokens for one in plain]


def test_a_pass_that_differs_from_transformers_is_not_used(monkeypatch: pytest.MonkeyPatch):
    causal: Any = t5.Positions.causal
    monkeypatch.setattr(t5.Positions, "causal", lambda *given: 3 * causal(*given))
    with pytest.warns(SlowerWarning, match="differ from transformers"):
        prepared = prepare_for_decoding(wrap_model(tiny_hf("t5")))
    assert not isinstance(prepared.decoder, T5Pass)


def test_an_unknown_activation_keeps_the_pass_of_transformers():
    assert t5.is_t5_like(tiny_hf("t5_v1_1"))
    assert not t5.is_t5_like(tiny_hf("t5", feed_forward_proj="tanh"))
    assert not t5.is_t5_like(tiny_hf("bart"))


def test_a_model_in_training_writes_with_its_weights_of_the_moment():
    model = tiny_model("t5_v1_1")
    writer = training_writer(model)
    assert writer is not model
    for _ in range(2):
        wanted = model.start_session().prefill(SOURCES)
        torch.testing.assert_close(
            writer.start_session().prefill(SOURCES), wanted, rtol=1e-4, atol=3e-5
        )
        with torch.no_grad():
            for weight in model.hf.parameters():
                weight *= 1.1


LENGTHS = (5, 26, 13, 40, 2, 9)


def texts_of(vocab_size: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=rng).tolist() for n in LENGTHS]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_padding_on_the_right_changes_neither_hidden_states_nor_loss(kind: str):
    hf = tiny_hf(kind).train()
    model = wrap_model(hf)
    texts = texts_of(model.vocab_size)
    batch = collate([TokenRow(text, 1) for text in texts])
    assert batch.attention_BT is not None, "rows of several lengths"
    with torch.inference_mode():
        logits_BTV = model.plain_head.logits(model.hidden(batch))
        log_probs_BTV = logits_BTV.log_softmax(-1)
        for row, text in enumerate(texts):
            alone = hf(input_ids=torch.tensor([text]), use_cache=False)
            count = len(text) - 1
            torch.testing.assert_close(
                logits_BTV[row, :count], alone.logits[0, :-1], rtol=1e-4, atol=1e-4
            )
            losses_T = -log_probs_BTV[row].gather(-1, batch.labels_BT[row][:, None])[:, 0]
            loss = losses_T[batch.mask_BT[row]].mean()
            torch.testing.assert_close(
                loss, cross_entropy(alone.logits[0], text), rtol=1e-4, atol=1e-4
            )


def cross_entropy(logits_TV: torch.Tensor, text: list[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(text[1:]))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_scores_of_a_text_are_those_of_a_plain_pass_over_it(kind: str):
    hf = tiny_hf(kind)
    model = wrap_model(hf)
    text = texts_of(model.vocab_size)[3]
    with torch.inference_mode():
        wanted_TV = hf(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    got_TV = forced_logits(model, text[:7], text[7:], SamplingParams(), model.vocab_size)
    torch.testing.assert_close(got_TV, wanted_TV[6:-1], rtol=0, atol=2e-3)
    nats = float(cross_entropy(wanted_TV, text)) * (len(text) - 1)
    assert document_nats(model, text) == pytest.approx(nats, rel=1e-4)
