"""Models with states: training passes and scoring, compared with transformers' plain pass."""

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow, collate
from paceline.measure.acceptance import forced_logits
from paceline.measure.perplexity import document_nats
from paceline.models import wrap_model
from support.models import HYBRIDS, tiny_hf

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
