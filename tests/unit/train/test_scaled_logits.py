"""Training and scoring with scaled or capped logits, against autograd through transformers."""

# N positions, T of a text, V vocabulary, S compared tokens
import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from paceline.core.divergences import token_weights
from paceline.core.fused import Head
from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow, collate
from paceline.measure.perplexity import document_nats
from paceline.models import HfModel
from paceline.models.hf.logit_map import LogitMap
from paceline.native import compiled
from paceline.train.evaluation import AgreementEvaluator
from paceline.train.loss import DraftLoss, Normalisers, StepPlan
from paceline.train.objectives import Objective
from paceline.train.pretrain import HeldOutLoss
from support.models import SCALED, tiny_model

NATIVE = pytest.param(
    True, marks=pytest.mark.skipif(compiled() is None, reason="no C compiler"), id="native"
)
ROADS = pytest.mark.parametrize("native", [NATIVE, pytest.param(False, id="autograd")])
ROWS = [
    TokenRow([5, 6, 7, 8, 9, 10, 11], 2),
    TokenRow([40, 41, 42, 43], 1),
    TokenRow([9, 8, 7, 6, 5, 4], 3),
]
VOCAB = 58  # three rows of padding
SUBSET = torch.tensor([*range(4, 12), 40, 41, 42, 43, 17, 30])
OFFSETS = torch.tensor([0.0] * 12 + [1.3, 1.3])

Pair = tuple[HfModel, HfModel]
pairs = pytest.mark.parametrize(
    "architectures",
    [*((name, name) for name in SCALED), ("gemma2", "llama"), ("llama", "gemma2")],
    ids="-".join,
)


def make_pair(architectures: tuple[str, str]) -> Pair:
    target, draft = architectures
    models = tiny_model(target), tiny_model(draft, seed=1, num_hidden_layers=2)
    for model in models:
        model.vocab_size = VOCAB
        cap = getattr(model.hf.config, "final_logit_softcapping", None)
        largest = float(logits_of(model.hf, ROWS[0]).detach().abs().max())
        assert cap is None or largest > 0.9 * cap, "the cap changes these logits"
    return models


def logits_of(hf: Any, row: TokenRow) -> Tensor:
    """Before each trained token: through the whole transformers model, alone."""
    return hf(torch.tensor([list(row.tokens)])).logits[0, row.trained_from - 1 : -1, :VOCAB]


def plain_loss(target: Any, draft: Any, objective: str, subset: str) -> Tensor:
    """The mean over all positions of the objective's formula."""
    found: list[Tensor] = []
    for row in ROWS:
        with torch.no_grad():
            target_TV = logits_of(target, row)
        draft_TV = logits_of(draft, row)
        p_TV, q_TV = target_TV.softmax(-1), draft_TV.softmax(-1)
        if subset == "drawn":
            p_TV, q_TV = ((x[:, SUBSET] + OFFSETS).softmax(-1) for x in (target_TV, draft_TV))
        if subset == "draft vocabulary":
            p_TV, q_TV = p_TV[:, SUBSET], draft_TV[:, SUBSET].softmax(-1)
        match objective:
            case "forward_kl":
                found.append((p_TV * (p_TV.log() - q_TV.log())).sum(-1))
            case "negative_log_acceptance":
                found.append(-torch.minimum(p_TV, q_TV).sum(-1).log())
            case _:
                labels = torch.tensor(list(row.tokens)[row.trained_from :])
                found.append(F.cross_entropy(draft_TV, labels, reduction="none"))
    return torch.cat(found).mean()


def our_loss(pair: Pair, objective: str, subset: str, *, native: bool) -> Tensor:
    target, draft = pair
    batch = collate(ROWS)
    weights_BT = token_weights(batch.mask_BT, mean="token", total=batch.mask_BT.sum())
    offsets_S = OFFSETS if subset == "drawn" else torch.zeros(len(SUBSET))
    vocabulary = None if subset == "all" else (SUBSET, offsets_S)
    terms = [TypeAdapter(Objective).validate_python({"kind": objective})]
    with torch.no_grad():
        hidden_ND = target.hidden(batch)[batch.mask_BT]
    normalisers_N = None
    if subset == "draft vocabulary":
        lengths = [len(row.tokens) - row.trained_from for row in ROWS]
        normalisers_N = Normalisers(VOCAB).of(ROWS, lengths, hidden_ND, target.head)
    loss = DraftLoss(draft, target, 3, vocab_size=VOCAB, bfloat16=False, add_up=lambda x: x)
    with patch("paceline.train.loss.can_differentiate", lambda _: native):
        plan = StepPlan(terms, vocabulary)
        return loss(batch, weights_BT, lambda: (hidden_ND, normalisers_N), plan, [None])


def compare(pair: Pair, objective: str, subset: str, *, native: bool) -> None:
    """Assert that loss and gradients of all weights are those of autograd."""
    plain = copy.deepcopy(pair[1].hf)
    wanted = plain_loss(pair[0].hf, plain, objective, subset)
    wanted.backward()
    got = our_loss(pair, objective, subset, native=native)
    got.backward()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    for (name, ours), theirs in zip(pair[1].hf.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None, name
            scale = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-3 * scale + 1e-8)


@pairs
@ROADS
def test_loss_and_gradients_are_those_of_autograd(architectures: tuple[str, str], native: bool):
    compare(make_pair(architectures), "forward_kl", "all", native=native)


@pytest.mark.parametrize("architectures", [("gemma2", "gemma2"), ("cohere", "nanochat")])
@pytest.mark.parametrize(
    ("objective", "subset"),
    [
        ("cross_entropy", "all"),
        ("negative_log_acceptance", "all"),
        ("forward_kl", "drawn"),
        ("negative_log_acceptance", "draft vocabulary"),
    ],
)
@ROADS
def test_objectives_and_subsets_are_those_of_autograd(
    architectures: tuple[str, str], objective: str, subset: str, native: bool
):
    compare(make_pair(architectures), objective, subset, native=native)


@pairs
def test_figures_are_those_of_a_plain_pass(architectures: tuple[str, str]):
    target, draft = make_pair(architectures)
    overlap = 0.0
    for row in ROWS:
        with torch.no_grad():
            p_TV, q_TV = (logits_of(each.hf, row).softmax(-1) for each in (target, draft))
        overlap += float(torch.minimum(p_TV, q_TV).sum())
    count = sum(len(row.tokens) - row.trained_from for row in ROWS)
    evaluator = AgreementEvaluator(target, ROWS, SamplingParams(), gamma=3, vocab_size=VOCAB)
    figures = evaluator.evaluate(draft)
    assert figures["expected_acceptance"] == pytest.approx(overlap / count, rel=1e-4)


@pytest.mark.parametrize("architecture", SCALED)
def test_nats_are_those_of_a_plain_pass(architecture: str):
    model = tiny_model(architecture)
    nats: list[float] = []
    for row in ROWS:
        with torch.no_grad():
            logits_TV = model.hf(torch.tensor([list(row.tokens)])).logits[0, :-1]
        labels = torch.tensor(list(row.tokens)[1:])
        nats.append(float(F.cross_entropy(logits_TV, labels, reduction="sum")))
        assert document_nats(model, row.tokens) == pytest.approx(nats[-1], rel=1e-4)
    whole = [TokenRow(row.tokens, 1) for row in ROWS]
    found = HeldOutLoss(whole, model.device).evaluate(model)
    assert found["loss"] == pytest.approx(sum(nats) / found["num_tokens"], rel=1e-4)


MUTANTS: dict[str, tuple[type, str, Any, str, bool]] = {
    "cap dropped": (Head, "capped", staticmethod(lambda values, _cap: values), "gemma2", False),
    "cap twice": (
        Head,
        "capped",
        staticmethod(lambda x, cap: cap * (x / cap).tanh().tanh()),
        "gemma2",
        False,
    ),
    "slope of the cap dropped": (Head, "slopes", lambda _self, _logits: None, "gemma2", True),
    "offset inside the cap": (
        Head,
        "raised",
        lambda self, offsets: self._replace(bias_V=offsets),
        "gemma2",
        False,
    ),
    "scale dropped": (LogitMap, "scaled", lambda _self, hidden: hidden, "granite", False),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    owner, attribute, mutant, architecture, native = MUTANTS[name]
    if native and compiled() is None:
        pytest.skip("no C compiler")
    pair = make_pair((architecture, architecture))
    for model in pair:
        _ = model.head  # the comparison at load, by the code without the fault
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(AssertionError):
        compare(pair, "forward_kl", "drawn", native=native)
