"""Drafts that propose a block in one pass, of transformers' architectures.

`tests/statistical/test_parallel_borders.py` has the law of their text.
"""

from itertools import product
from typing import Any

import pytest
import torch

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder, TokenCascade
from paceline.decode.block import draw
from paceline.errors import ModelLoadError
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.models import HfModel, wrap_model
from support.fakes import TableModel
from support.models import ENCODER_DECODERS, generated, tiny_hf, tiny_pair

MASK = 5
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[7], [7, 3, 30, 12, 9, 44], [8, 51, MASK, 17, 23, 5, 9, 9, 9], [40, 2]]
ARCHITECTURES = ("llama", "qwen3", "gpt2", "gemma2", "mistral", "t5", "bart")


def pair(architecture: str, **overrides: Any) -> tuple[HfModel, HfModel]:
    """A pair whose draft proposes in parallel."""
    target, draft = tiny_pair(architecture, **overrides)
    draft.hf.config.pard_token = MASK
    return target, wrap_model(draft.hf, draft.tokenizer)


@pytest.mark.parametrize(
    ("architecture", "penalty"), [*product(ARCHITECTURES, [1.0]), ("llama", 1.3)]
)
def test_greedy_texts_of_ragged_rows_are_those_of_generate(architecture: str, penalty: float):
    target, draft = pair(architecture)
    assert draft.mask_token == MASK
    sampling = SamplingParams(temperature=0, repetition_penalty=penalty)
    decoder = SpeculativeDecoder(target, draft, gamma=4, sampling=sampling)
    found = decoder.generate(PROMPTS, 24, batch_size=3)
    wanted = [generated(target.hf, p, 24, repetition_penalty=penalty) for p in PROMPTS]
    assert [each.tokens for each in found] == wanted
    # of a draft that is the target itself, the first place is always accepted
    twin = target.rewrap(target.hf)
    twin.mask_token = MASK
    for each in SpeculativeDecoder(target, twin, gamma=3, sampling=GREEDY).generate(PROMPTS, 24):
        assert each.stats.num_accepted >= each.stats.num_blocks - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_q_of_each_place_is_that_of_transformers_behind_masks(architecture: str):
    """A plain pass over each row alone: the text, then masks; afterwards the masks are gone."""
    _, draft = pair(architecture)
    session = draft.start_session()
    session.prefill([prompt[:-1] if len(prompt) > 1 else prompt for prompt in PROMPTS])
    begins = list(session.lengths)
    unread = [prompt[-1:] for prompt in PROMPTS]
    for _ in range(2):
        plan = DrawPlan(3, SamplingParams(), after_last=True, mask=MASK)
        drawn = draw(session, DrawRequest(unread, plan, [[0.1, 0.5, 0.9]] * len(PROMPTS)))
        assert session.lengths == [begin + 1 for begin in begins]
        assert drawn.probs_BPV is not None
        for row, prompt in enumerate(PROMPTS):
            source = prompt[:-1] if len(prompt) > 1 else prompt
            text = [*(draft.decoder_prompt or source), prompt[-1], MASK, MASK, MASK]
            given = {"input_ids": torch.tensor([text])}
            if architecture in ENCODER_DECODERS:
                given = {"input_ids": torch.tensor([source])}
                given["decoder_input_ids"] = torch.tensor([text])
            with torch.inference_mode():
                logits = draft.hf(**given).logits[0, -4:, : draft.vocab_size].float()
            torch.testing.assert_close(drawn.probs_BPV[row], logits.softmax(-1), atol=1e-5, rtol=0)
        session.rollback([1] * len(PROMPTS))


def test_a_block_that_the_drafts_context_does_not_hold_is_the_targets():
    target, draft = pair("llama")
    draft.max_length = 12
    decoder = SpeculativeDecoder(target, draft, gamma=8, sampling=GREEDY)
    found = decoder.generate(PROMPTS, 16)
    assert [each.tokens for each in found] == [generated(target.hf, p, 16) for p in PROMPTS]


def test_a_cascade_that_verifies_nothing_drafts_token_by_token():
    target, draft = pair("llama")
    plain = draft.rewrap(draft.hf)
    plain.mask_token = None
    texts = [
        TokenCascade(target, each, 0.9, GREEDY).generate(PROMPTS, 16) for each in (draft, plain)
    ]
    assert [each.tokens for each in texts[0]] == [each.tokens for each in texts[1]]


@pytest.mark.parametrize("token", [61, -1, "mask"])
def test_a_mask_without_an_embedding_is_refused_by_its_key(token: Any):
    with pytest.raises(ModelLoadError, match=r"pard_token .*, wanted the id of one of 61"):
        wrap_model(tiny_hf("llama", pard_token=token))


def test_tokens_per_call_are_predicted_by_the_places_of_a_block():
    """2,000 texts: decoded and predicted within 5 deviations; token by token, far off."""
    target, draft = (TableModel.random(6, 2, seed=seed, spread=1.5) for seed in (0, 1))
    prompts = [[number % 6, number // 6 % 6] for number in range(2000)]
    texts = [one.tokens for one in AutoregressiveDecoder(target).generate(prompts, 12)]

    def predicted(mask: int | None) -> float:
        draft.mask_token = mask
        of = PairTexts(target, draft, prompts, texts, SamplingParams(), max_new_tokens=12, gamma=3)
        tokens_B, blocks_B = score_texts(of).tokens_and_blocks(3, of.budgets)
        return float(tokens_B.sum() / blocks_B.sum())

    alone, found = predicted(None), predicted(MASK)
    decoded = SpeculativeDecoder(target, draft, gamma=3).generate(prompts, 12)
    rates = torch.tensor([one.stats.num_emitted / one.stats.num_blocks for one in decoded])
    total = sum((one.stats for one in decoded), DecodeStats())
    error = 5 * float(rates.std()) / len(prompts) ** 0.5
    assert abs(total.num_emitted / total.num_blocks - found) < error
    assert abs(alone - found) > error
