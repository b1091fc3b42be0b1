"""Layouts of vLLM's samplers: ragged and mixed batches, greedy requests, seeds, invalid drafts."""

import pytest
import torch
from torch import Tensor

from paceline.core.rules import Lossless, Rule, TokenV3
from paceline.engines.vllm_rules import rejection_sample

V = 7
COUNTS = [2, 0, 3, 1, 3, 0]
TEMPERATURES = [0.0, 1.0, 0.7, 0.0, 0.0, 0.5]
RULES = [Lossless(), TokenV3(alpha=0.5)]


def logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Requests:
    """Six requests and the rows of their drafts."""

    def __init__(self, *, all_greedy: bool = False) -> None:
        self.target = logits(sum(COUNTS), V)
        self.draft = logits(sum(COUNTS), V, seed=1)
        self.bonus = torch.tensor([[6], [5], [4], [3], [2], [1]], dtype=torch.int32)
        # most drafts are the target's argmax
        guesses = torch.randint(V, (sum(COUNTS),), generator=torch.Generator().manual_seed(2))
        lucky = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
        self.drafted = torch.where(lucky, self.target.argmax(-1), guesses).to(torch.int32)
        self.temperature = torch.tensor([0.0] * 6 if all_greedy else TEMPERATURES)

    def judged(self, rule: Rule, seeds: Tensor, keep: list[int] | None = None) -> list[list[int]]:
        """Each request's rows with a bonus row behind them; request i is at place 9 - i."""
        keep = list(range(6)) if keep is None else keep
        rows, sampled, places, steps, pos = [], [], [], [], []
        draft = torch.zeros(10, 3, V)
        starts = torch.tensor([0, *COUNTS]).cumsum(0).tolist()
        for request in keep:
            first, count = starts[request], COUNTS[request]
            bonus = torch.full((1, V), -9.0)
            bonus[0, int(self.bonus[request])] = 9.0
            rows += [self.target[first : first + count], bonus]
            sampled += [0, *self.drafted[first : first + count].tolist()]
            places += [9 - request] * (count + 1)
            steps += range(count + 1)
            pos += range(20 + request, 21 + request + count)
            draft[9 - request, :count] = self.draft[first : first + count]
        temperature = torch.zeros(10)
        temperature[[9 - request for request in range(6)]] = self.temperature
        bounds = torch.tensor([0, *[COUNTS[request] + 1 for request in keep]]).cumsum(0)
        tokens, counts = rejection_sample(
            rule,
            torch.cat(rows),
            draft,
            torch.tensor(sampled, dtype=torch.int32),
            bounds.to(torch.int32),
            torch.tensor(pos),
            torch.tensor(places, dtype=torch.int32),
            torch.tensor(steps),
            temperature,
            seeds,
            3,
        )
        assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
        found = shortened(tokens)
        assert [len(row) for row in found] == counts.tolist()
        return found

    def greedy(self, request: int) -> list[int]:
        """By a plain loop: drafts while they are the argmax, then the argmax or the bonus."""
        first = sum(COUNTS[:request])
        text: list[int] = []
        for row in range(first, first + COUNTS[request]):
            best = int(self.target[row].argmax())
            text.append(best)
            if best != int(self.drafted[row]):
                return text
        return [*text, int(self.bonus[request])]


def shortened(tokens: Tensor) -> list[list[int]]:
    """Without the -1 behind each text."""
    rows = [[token for token in row if token >= 0] for row in tokens.tolist()]
    for row, full in zip(rows, tokens.tolist(), strict=True):
        assert full[: len(row)] == row
        assert set(full[len(row) :]) <= {-1}
    return rows


@pytest.mark.parametrize("rule", RULES)
def test_greedy_requests_follow_the_targets_argmax(rule: Rule):
    requests = Requests(all_greedy=True)
    wanted = [requests.greedy(request) for request in range(6)]
    assert requests.judged(rule, torch.arange(10)) == wanted
    assert len({len(text) for text in wanted}) > 2


@pytest.mark.parametrize("rule", RULES)
def test_greedy_requests_in_a_mixed_batch_do_too(rule: Rule):
    requests = Requests()
    greedy = [request for request in range(6) if TEMPERATURES[request] == 0]
    found = requests.judged(rule, torch.arange(10))
    for request in greedy:
        assert found[request] == requests.greedy(request)
    for request, text in enumerate(found):
        assert 1 <= len(text) <= COUNTS[request] + 1
        if not COUNTS[request]:
            assert text == [int(requests.bonus[request])]


def test_a_request_depends_on_its_own_seed_and_rows_alone():
    requests = Requests()
    seeds = torch.arange(10) * 7919
    together = requests.judged(TokenV3(alpha=0.5), seeds)
    for request in range(6):
        assert requests.judged(TokenV3(alpha=0.5), seeds, [request]) == [together[request]]
    assert requests.judged(TokenV3(alpha=0.5), seeds, [4, 2]) == [together[4], together[2]]
    others = [requests.judged(TokenV3(alpha=0.5), seeds + n)[2] for n in range(1, 20)]
    assert len({tuple(text) for text in [together[2], *others]}) > 2


def of_one_request(target: Tensor, draft: Tensor, given: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and counts of a request with one drafted token."""
    numbers = ([0, 2], [7, 8], [0, 0], [0, 1])
    settings = (torch.tensor(given), *map(torch.tensor, numbers), torch.ones(1), torch.tensor([11]))
    return rejection_sample(Lossless(), target, draft, *settings, 1)


def test_a_draft_that_is_not_valid_is_rejected_and_replaced_by_a_token_of_the_target():
    target = torch.full((2, V), -30.0)
    target[:, 4] = 0.0
    draft = torch.zeros(1, 1, V)
    draft[0, 0, 4] = 30.0  # its residual would never give token 4
    tokens, counts = of_one_request(target, draft, [1, -1])
    assert tokens.tolist() == [[4, -1]]
    assert counts.tolist() == [1]


def test_a_target_with_padded_logits_never_gives_padding():
    target = torch.zeros(2, V + 3)
    target[:, V:] = 50.0
    tokens, _ = of_one_request(target, torch.zeros(1, 1, V), [1, 2])
    assert int(tokens.max()) < V
