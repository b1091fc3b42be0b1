"""Block efficiency predicted from plain text of the target is what speculative decoding then gives.

Texts end with an end-of-text token or at the budget, most of them within a few blocks. Both sides
are ratios of sums over independent texts; a test fails where they differ by more than 4.5 standard
errors of the difference, odds of a false alarm below 1e-5 for each.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.speed import examined_places
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.acceptance import PairTexts, TextScores, budgets_of, score_texts
from support.fakes import TableModel

NUM_TEXTS = 2000
ERRORS = 4.5
PROMPT = [3, 1]


@cache
def pair(end_chance: float) -> tuple[TableModel, TableModel]:
    """Five tokens, of which 0 ends a text; after some the draft is good, after others bad."""
    tables: list[Tensor] = []
    for seed, spread in ((1, 1.0), (2, 1.4)):
        rng = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(25, 5, generator=rng, dtype=torch.float64)
        logits[:15] = tables[0].log()[:15] if tables else logits[:15]
        table = logits.softmax(-1)
        table[:, 1:] *= (1 - end_chance) / table[:, 1:].sum(-1, keepdim=True)
        table[:, 0] = end_chance
        tables.append(table)
    target, draft = (TableModel(table, eos_token_ids=(0,)) for table in tables)
    return target, draft


@cache
def scored(target: TableModel, draft: TableModel, budget: int) -> TextScores:
    texts = AutoregressiveDecoder(target).generate([PROMPT] * NUM_TEXTS, budget, seed=10**6)
    tokens = [text.tokens for text in texts]
    prompts = [PROMPT] * NUM_TEXTS
    return score_texts(PairTexts(target, draft, prompts, tokens, SamplingParams()))


@cache
def decoded(
    target: TableModel, draft: TableModel, gamma: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Tokens behind the first and blocks of each text, as the engine makes them."""
    decoder = SpeculativeDecoder(target, draft, gamma=gamma)
    found = decoder.generate([PROMPT] * NUM_TEXTS, budget)
    tokens = torch.tensor([float(one.stats.num_emitted) for one in found])
    return tokens, torch.tensor([float(one.stats.num_blocks) for one in found])


def distance(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Between two ratios of sums, in standard errors of their difference."""
    values, errors = zip(*map(ratio, (first, second)), strict=True)
    return abs(values[0] - values[1]) / math.hypot(*errors)


def ratio(parts: tuple[Tensor, Tensor]) -> tuple[float, float]:
    over, under = (part.double() for part in parts)
    value = float(over.sum() / under.sum())
    return value, float((over - value * under).std() / under.mean() / len(over) ** 0.5)


cases = pytest.mark.parametrize(
    ("end_chance", "budget", "gamma"),
    [(0.0, 6, 3), (0.0, 12, 8), (0.15, 12, 2), (0.15, 40, 4), (0.3, 40, 8), (0.3, 5, 8)],
)


@cases
def test_the_engine_gives_the_tokens_per_block_that_text_predicts(
    end_chance: float, budget: int, gamma: int
):
    """n = 2,000 texts on either side."""
    models = pair(end_chance)
    budget_B = budgets_of(models, [PROMPT] * NUM_TEXTS, budget)
    predicted = scored(*models, budget).tokens_and_blocks(gamma, budget_B)
    assert distance(predicted, decoded(*models, gamma, budget)) < ERRORS


def whole_windows(scores: TextScores, gamma: int) -> tuple[Tensor, Tensor]:
    """The mutant: only blocks with gamma positions of text left, each drafting all of them."""
    acceptance, survival, mask = (part.double() for part in scores.drafted)
    batch, length = survival.shape
    starts = torch.zeros(batch, length + gamma + 2, dtype=torch.float64)
    starts[:, 0] = 1
    tokens, blocks = torch.zeros(2, batch, dtype=torch.float64)
    for place in range(length - gamma + 1):
        whole = mask[:, place + gamma - 1]
        passed, given = starts[:, place].clone(), starts[:, place].clone()
        for offset in range(place, place + gamma):
            given += passed * acceptance[:, offset]
            starts[:, offset + 1] += passed * (1 - survival[:, offset])
            passed *= survival[:, offset]
        starts[:, place + gamma + 1] += passed
        tokens, blocks = tokens + whole * given, blocks + whole * starts[:, place]
    return tokens, blocks


@pytest.mark.parametrize(
    ("end_chance", "budget", "gamma"), [(0.0, 6, 3), (0.15, 12, 2), (0.15, 40, 4)]
)
def test_counting_whole_windows_alone_is_caught(end_chance: float, budget: int, gamma: int):
    """n = 2,000 texts on either side."""
    models = pair(end_chance)
    mutant = whole_windows(scored(*models, budget), gamma)
    assert distance(mutant, decoded(*models, gamma, budget)) > 2 * ERRORS


def test_a_bonus_behind_the_end_of_text_is_caught():
    """The mutant gives a block its bonus although an end of text was accepted. n = 2,000."""
    models, gamma, budget = pair(0.3), 4, 40
    scores = scored(*models, budget)
    budget_B = budgets_of(models, [PROMPT] * NUM_TEXTS, budget)
    tokens_B, blocks_B = scores.tokens_and_blocks(gamma, budget_B)
    _, survival, mask = scores.drafted
    judged = examined_places(survival, mask, gamma, budget=budget_B - 1)
    ends = torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True) - 1
    mutant = tokens_B + (judged * survival * ends).sum(-1), blocks_B
    assert distance(mutant, decoded(*models, gamma, budget)) > 2 * ERRORS
