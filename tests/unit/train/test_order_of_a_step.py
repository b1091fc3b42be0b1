"""The order of a step: what a GPU would be waited for, and when the target's states are fetched."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.divergences import token_weights
from paceline.data.collate import TokenRow, collate
from paceline.train.loss import DraftLoss, StepPlan
from paceline.train.objectives import ForwardKL
from support.models import tiny_model


class Events(TorchDispatchMode):
    """Notes operations whose result has a size that the device alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = func.overloadpacket.__name__
        masks = named == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or named in {"nonzero", "masked_select", "_local_scalar_dense"}:
            self.seen.append("waits")
        return func(*args, **(kwargs or {}))


def test_states_are_fetched_before_anything_waits_for_the_drafts_pass():
    target, draft = tiny_model(), tiny_model(seed=1)
    batch = collate([TokenRow([5, 6, 7, 8, 9], 2), TokenRow([40, 41, 42], 1)])
    with torch.no_grad():
        hidden_ND = target.hidden(batch)[batch.mask_BT]
    weights_BT = token_weights(batch.mask_BT, mean="token", total=batch.mask_BT.sum())
    sizes: dict[str, Any] = {"vocab_size": 61, "bfloat16": False}
    loss = DraftLoss(draft, target, 3, **sizes, add_up=lambda x: x)
    events = Events()
    hook = draft.hf.base_model.layers[-1].register_forward_hook(
        lambda *_: events.seen.append("pass")
    )

    def scored() -> tuple[torch.Tensor, None]:
        events.seen.append("states")
        return hidden_ND, None

    plan = StepPlan([ForwardKL()])
    with events:
        loss(batch, weights_BT, scored, plan, [None])
    hook.remove()
    before = events.seen[: events.seen.index("states")]
    assert before[-1] == "pass"
    assert "waits" in before
