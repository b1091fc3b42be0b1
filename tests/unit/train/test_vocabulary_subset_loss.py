"""A divergence over part of the vocabulary: what it leaves out comes back on average."""

import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from paceline.core.fused import Head
from paceline.models import load_model
from paceline.models.drafts.save import save_draft
from paceline.native import compiled
from paceline.rng import named_generator
from paceline.train import align
from paceline.train.loss import LossVocabulary, VocabularySample, places_of
from paceline.train.objectives import Compared, Objective, TVDPlusPlus, policies_of, token_losses
from paceline.train.step import Stepper
from support.data import write_lines
from support.models import limit_vocabulary
from support.runs import align_config, losses, write_pair


def sample(frequent: int, drawn: int, counts: list[int]) -> VocabularySample:
    ranking = torch.tensor(counts).argsort(descending=True, stable=True)
    return VocabularySample(LossVocabulary(frequent=frequent, drawn=drawn), ranking)


def test_the_frequent_ones_are_always_there_and_the_others_are_drawn_from_the_rest():
    vocabulary = sample(2, 2, [0, 9, 1, 7, 0, 2])
    seen = set()
    for step in range(40):
        tokens_S, offsets_S = vocabulary.draw(named_generator(0, "draw", step))
        assert tokens_S[:2].tolist() == [1, 3]
        assert len(set(tokens_S.tolist())) == 4
        assert offsets_S.tolist() == pytest.approx([0, 0, *[torch.tensor(4 / 2).log().item()] * 2])
        seen |= set(tokens_S[2:].tolist())
    assert seen == {0, 2, 4, 5}


def test_the_sum_in_the_denominator_is_right_on_average():
    # all six ways to draw two of four others are equally likely
    logits_V = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.7, -0.2], dtype=torch.float64)
    vocabulary = sample(2, 2, [0, 9, 1, 7, 0, 2])
    _, offsets_S = vocabulary.draw(named_generator(0, "draw"))
    sums = []
    for pair in itertools.combinations([0, 2, 4, 5], 2):
        cut_S = logits_V[[1, 3, *pair]] + offsets_S
        sums.append(cut_S.exp().sum())
    assert float(torch.stack(sums).mean()) == pytest.approx(float(logits_V.exp().sum()), rel=1e-6)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 6)])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_drawing_all_of_them_is_the_whole_vocabulary(bias: torch.Tensor | None, cap: float | None):
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(6, 3, generator=generator), bias, cap)
    hidden_ND = torch.randn(4, 3, generator=generator)
    tokens_S, offsets_S = sample(2, 99, [0, 9, 1, 7, 0, 2]).draw(named_generator(0, "draw"))
    assert offsets_S.tolist() == [0] * 6
    cut = head.rows(tokens_S).raised(offsets_S)
    torch.testing.assert_close(cut.log_probs(hidden_ND), head.log_probs(hidden_ND)[:, tokens_S])


def test_labels_stand_where_their_token_does_or_nowhere():
    places, known = places_of(torch.tensor([4, 0, 2, 4]), torch.tensor([2, 5, 4]), 6)
    assert places.tolist() == [2, 0, 0, 2]
    assert known.tolist() == [True, False, True, True]


# the target; the draft proposes the first two
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def loss_and_slope(objective: str, q: list[float]) -> tuple[float, list[float]]:
    """Of a draft over the first two tokens, and by its logits."""
    terms = [TypeAdapter(Objective).validate_python({"kind": objective})]
    logits = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
    coverage = P[:2].sum()
    target_log_probs = (P[:2] / coverage).log()[None]
    compared = Compared(
        target_log_probs,
        logits.log_softmax(-1),
        torch.zeros(1, dtype=torch.int64),
        log_coverage_C=coverage.log()[None],
    )
    loss = token_losses(terms, compared)
    loss.sum().backward()
    assert logits.grad is not None
    return float(loss.detach()), logits.grad[0].tolist()


@pytest.mark.parametrize(
    ("objective", "q", "loss", "slope"),
    [
        # min(0.5, 0.4) + min(0.3, 0.6) = 0.7; by log q -0.4 for the first token alone, by its logit
        # -0.4 + 0.4 * 0.4; the target renormalised, (0.625, 0.375), would give 0.225
        ("tvd", 0.4, 0.3, -0.24),
        ("negative_log_acceptance", 0.4, -math.log(0.7), -0.24 / 0.7),
        # 0.8 is all that two tokens can have accepted; a renormalised target would still push
        ("tvd", 0.6, 0.2, 0.0),
        ("negative_log_acceptance", 0.6, -math.log(0.8), 0.0),
        # to the target renormalised: what the draft cannot propose would make it infinite
        ("forward_kl", 0.625, 0.0, 0.0),
    ],
)
def test_losses_over_some_tokens_are_those_of_what_is_accepted_of_them(
    objective: str, q: float, loss: float, slope: float
):
    """`q` of the first token, and the slope by its logit."""
    found, slopes = loss_and_slope(objective, [q, 1 - q])
    assert [found, *slopes] == pytest.approx([loss, slope, -slope], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("estimator", ["exact", "uniform"])
def test_tvd_plus_plus_over_some_tokens_rewards_by_the_whole_target(estimator: str):
    """Both tokens have their due: none is wanted more than it is proposed; all rewards are 0."""
    term = TVDPlusPlus(estimator=estimator)
    logits = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log().requires_grad_()
    served = P[:2].log()[None]
    policies = policies_of([term], [None], [(served, logits.detach())], lambda moments: moments)
    compared = Compared(
        served - math.log(0.8),
        logits.log_softmax(-1),
        torch.zeros(1, dtype=torch.int64),
        log_coverage_C=torch.tensor([math.log(0.8)], dtype=torch.float64),
    )
    loss = token_losses([term], compared, policies)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0.2)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0, 0], abs=1e-12)


NATIVE = pytest.mark.skipif(compiled() is None, reason="no C compiler")
ROADS = [pytest.param(True, marks=NATIVE), False]
PROMPT, COMPLETION = [5, 6, 7], [8, 9, 30, 40]
OBJECTIVES = ["tvd", "negative_log_acceptance"]
SAMPLES = [None, {"frequent": 7, "drawn": 193}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft proposes 200 of 266 tokens, and a text."""
    folder = write_pair(tmp_path_factory.mktemp("few"), initializer_range=0.1)
    target, draft = (load_model(folder / name, dtype="float32") for name in ("target", "draft"))
    few = limit_vocabulary(draft, target, [[5, 6, 7, 8, 9]], 200)
    save_draft(few, folder / "target", folder / "few")
    row = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION}
    write_lines(folder / "corpus.jsonl", row, row | {"completion_tokens": [9, 9]})
    return folder


def test_a_step_without_a_token_that_the_draft_proposes_changes_nothing(
    folder: Path, tmp_path: Path
):
    proposed = load_model(folder / "few", dtype="float32").draft_vocabulary
    assert proposed is not None
    others = sorted(set(range(266)) - set(proposed.tolist()))[:4]
    row = {"prompt_tokens": PROMPT, "completion_tokens": others}
    changes: dict[str, Any] = {"draft": str(folder / "few"), "objective": "cross_entropy"}
    changes |= {"data": {"train": str(write_lines(tmp_path / "text.jsonl", row))}}
    changes |= {"batch_size": 1, "num_steps": 2, "max_completion_tokens": 4}
    run = align(align_config(folder, tmp_path / "run", **changes))
    assert losses(run) == [0, 0]
    before, after = (load_model(path) for path in (folder / "few", run / "draft"))
    for name, weight in before.hf.state_dict().items():
        assert torch.equal(weight, after.hf.state_dict()[name]), name


def served_losses(folder: Path) -> tuple[dict[str, float], Any]:
    """1 - sum_K min(p, q) and its log, token by token in transformers; the draft with their sum."""
    target = load_model(folder / "target", dtype="float32").hf.double()
    few = load_model(folder / "few", dtype="float32")
    draft, tokens_K = few.hf.double(), few.draft_vocabulary
    assert tokens_K is not None
    found: dict[str, Tensor] = {name: torch.zeros(()) for name in OBJECTIVES}
    for completion in (COMPLETION, [9, 9]):
        tokens = torch.tensor([[*PROMPT, *completion, 1]])
        with torch.no_grad():
            p = target(tokens).logits[0, 2:-1].softmax(-1)
        q = draft(tokens).logits[0, 2:-1][:, tokens_K].softmax(-1)
        for name in OBJECTIVES:
            per_token = []
            for position in range(len(q)):
                accepted = sum(
                    torch.minimum(p[position, int(token)], q[position, place])
                    for place, token in enumerate(tokens_K)
                )
                assert isinstance(accepted, Tensor)
                assert float(accepted.detach()) < 0.95 * float(p[position, tokens_K].sum()) < 0.9
                per_token.append(1 - accepted if name == "tvd" else -accepted.log())
            found[name] = found[name] + torch.stack(per_token).mean() / 2
    return {name: float(value.detach()) for name, value in found.items()}, (draft, found)


@pytest.mark.slow
@pytest.mark.parametrize("native", ROADS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_loss_and_gradient_are_those_of_what_is_served(
    folder: Path, tmp_path: Path, native: bool, objective: str, sample: Any
):
    grads: list[Tensor] = []
    update = Stepper._update

    def spy(stepper: Any, rate: Any) -> float:
        grads.append(stepper.model.hf.model.layers[0].mlp.up_proj.weight.grad.clone())
        return update(stepper, rate)

    data = {"train": str(folder / "corpus.jsonl")}
    changes: dict[str, Any] = {"draft": str(folder / "few"), "data": data, "num_steps": 1}
    changes |= {"batch_size": 2, "objective": objective, "max_gradient_norm": None}
    changes |= {"loss_vocabulary": sample, "chunk_tokens": 3}
    config = align_config(folder, tmp_path / "run", **changes)
    road = patch("paceline.train.loss.can_differentiate", lambda _: native)
    with road, patch.object(Stepper, "_update", spy):
        found = losses(align(config))
    values, (draft, whole) = served_losses(folder)
    assert found == [pytest.approx(values[objective], rel=1e-4)]
    whole[objective].backward()
    wanted = draft.model.layers[0].mlp.up_proj.weight.grad
    torch.testing.assert_close(grads[0].double(), wanted, rtol=1e-3, atol=1e-6)
