"""Training a draft that proposes some tokens, against what would be served of it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.models import load_model
from paceline.models.drafts.restricted_head import limit_vocabulary
from paceline.models.drafts.save import save_draft
from paceline.native import compiled
from paceline.train import align
from paceline.train.step import Stepper
from support.runs import align_config, losses, write_corpus, write_pair

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
    write_corpus(folder / "corpus.jsonl", [row, row | {"completion_tokens": [9, 9]}])
    return folder


def test_a_step_without_a_token_that_the_draft_proposes_changes_nothing(
    folder: Path, tmp_path: Path
):
    proposed = load_model(folder / "few", dtype="float32").draft_vocabulary
    assert proposed is not None
    others = sorted(set(range(266)) - set(proposed.tolist()))[:12]
    row = {"prompt_tokens": PROMPT, "completion_tokens": others}
    changes: dict[str, Any] = {"draft": str(folder / "few"), "objective": "cross_entropy"}
    changes |= {"data": {"train": str(write_corpus(tmp_path / "text.jsonl", [row]))}}
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
