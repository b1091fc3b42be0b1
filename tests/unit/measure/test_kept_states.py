"""Scores with kept hidden states equal those with a pass of the target for each draft."""

from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.errors import UnsupportedModelError
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.measure.trajectory import KeptStates
from paceline.models import HfModel, wrap_model
from support.models import tiny_hf, tiny_pair

PROMPTS = [[5], [7, 8, 9, 4], [11, 12], [6, 6, 5], [9, 10, 11, 12, 13]]
TEXTS = [[3, 4, 5], [8, 9, 10, 11, 12, 13], [4], [20, 21, 22, 23], [3, 9]]
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "t5_v1_1", "bart"])
def test_scores_of_every_draft_are_those_of_a_pass_of_its_own(architecture: str):
    target, draft = tiny_pair(architecture)
    kept = KeptStates(target)
    for other in (draft, target):
        texts = PairTexts(target, other, PROMPTS, TEXTS, SAMPLING)
        both = score_texts(texts), score_texts(texts, target_logits=kept)
        for wanted, got in zip(*both, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_target_processes_each_text_once(monkeypatch: pytest.MonkeyPatch):
    target, draft = tiny_pair()
    kept = KeptStates(target)  # compares the head with that of transformers
    passes: list[int] = []
    hidden = type(target).hidden

    def counted(self: HfModel, batch: object) -> torch.Tensor:
        passes.extend([1] * (self is target))
        return hidden(self, batch)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(target), "hidden", counted)
    monkeypatch.setattr("paceline.measure.acceptance._MOST_LOGITS", 0)  # four texts in a batch
    monkeypatch.setattr("paceline.measure.acceptance._MOST_LOGITS_CUDA", 0)
    for _ in range(2):
        score_texts(PairTexts(target, draft, PROMPTS, TEXTS, SAMPLING), target_logits=kept)
        assert len(passes) == 2


@pytest.mark.parametrize("architecture", ["llama", "t5_v1_1"])
def test_scores_do_not_depend_on_the_size_of_a_batch(
    architecture: str, monkeypatch: pytest.MonkeyPatch
):
    texts = PairTexts(*tiny_pair(architecture), PROMPTS, TEXTS, SAMPLING)
    assert texts.batch_size == 64, "tiny models"
    found = score_texts(texts)
    monkeypatch.setattr("paceline.measure.acceptance._MOST_TEXTS", 1)
    for together, alone in zip(found, score_texts(texts), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_target_whose_logits_are_an_unknown_function_has_none():
    hf = tiny_hf()

    def clamp(_hf: object, _inputs: object, output: Any) -> None:
        output.logits.clamp_(max=1)

    hf.register_forward_hook(clamp)
    with pytest.raises(UnsupportedModelError):
        KeptStates(wrap_model(hf))


@pytest.mark.parametrize("keeps", [False, True])
def test_tokens_that_models_may_not_write_leave_the_cross_entropy_as_it_is(keeps: bool):
    """By transformers, without the columns of these tokens."""
    hfs = tiny_hf(seed=0), tiny_hf(seed=1, num_hidden_layers=2)
    for hf in hfs:
        hf.generation_config.suppress_tokens = [30, 41]  # pyright: ignore
    target, draft = map(wrap_model, hfs)
    texts = PairTexts(target, draft, PROMPTS, TEXTS, SamplingParams())
    kept = KeptStates(target) if keeps else None
    found = score_texts(texts, target_logits=kept, with_cross_entropy=True)
    assert found.cross_entropy_BT is not None
    allowed = [token for token in range(61) if token not in (30, 41)]
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        whole = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            p_TV, q_TV = (hf(whole).logits[0, len(prompt) - 1 : -1, allowed] for hf in hfs)
        wanted_T = torch.nn.functional.cross_entropy(q_TV, p_TV.softmax(-1), reduction="none")
        got_T = found.cross_entropy_BT[row]
        torch.testing.assert_close(got_T[: len(text)], wanted_T, rtol=1e-4, atol=1e-5)
        assert not got_T[len(text) :].any()
