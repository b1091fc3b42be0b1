"""The loss of a step: chunks that fit the memory of a GPU, here a pretended one, and its order."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core.divergences import token_weights
from paceline.core.fused import Head, chunked_loss
from paceline.data.collate import TokenRow, collate
from paceline.train.loss import ChunkLoss, DraftLoss, StepPlan, TargetScores, chunk_size
from paceline.train.objectives import ForwardKL, Objective, policies_of, uniforms_of_terms
from support.models import tiny_model

GIB = 2**30
VOCABULARY = 128_256


def chosen(configured: Any = "auto", device: str = "cuda", entries: int = VOCABULARY) -> int:
    return chunk_size(configured, torch.device(device), entries, 1)


def test_much_memory_gives_the_largest_chunk_and_little_the_smallest(
    monkeypatch: pytest.MonkeyPatch,
):
    assert chosen(1000) == 1000
    assert chosen(device="cpu") == 256
    gpu = SimpleNamespace(free=100 * GIB, reserved=0, allocated=0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (gpu.free, 141 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: gpu.reserved)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: gpu.allocated)
    assert chosen() == 8192
    gpu.free = 0
    assert chosen() == 256
    # half of 30 GiB, by 48 bytes for each of 128,256 entries: 2,616 tokens, in steps of 256
    gpu.free = 30 * GIB
    assert chosen() == 2560
    assert chosen(entries=2 * VOCABULARY) == 1280
    gpu.free, gpu.reserved, gpu.allocated = 10 * GIB, 30 * GIB, 10 * GIB
    assert chosen() == 2560, "what PyTorch's cache holds is free"


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return made

    def free(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


def bytes_per_entry(terms: list[Any], *, bfloat16: bool) -> float:
    """Peak memory of a chunk's loss and its gradients, by token and vocabulary entry."""
    size, entries, width = 96, 4_000, 8
    rng = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(size, width, generator=rng, requires_grad=True)
    weights = [torch.randn(entries, width, generator=rng) for _ in range(2)]
    stored = weights[1].to(torch.bfloat16 if bfloat16 else torch.float32)
    head = Head(weights[0].requires_grad_())
    target = TargetScores(hidden_ND.detach(), Head(stored), None, None)
    uniforms = uniforms_of_terms(terms, [(rng, size)])
    ones_N = torch.ones(size)
    loss = ChunkLoss(terms, None, head, target, torch.arange(size), ones_N, None)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), Peak() as peak:
        whole = slice(0, size)
        policies = policies_of(
            terms,
            uniforms,
            [(target.served_log_probs(whole), head.log_probs(hidden_ND).detach())],
            lambda values: values,
        )
        of_chunk = loss._replace(policies=policies).by_autograd
        chunked_loss(hidden_ND, head, of_chunk, ones_N, chunk_size=size)
    return peak.most / (size * entries)


OBJECTIVES: dict[str, list[Any]] = {
    **{kind: [kind] for kind in ("forward_kl", "reverse_kl", "jsd", "tvd", "cross_entropy")},
    "acceptance": ["negative_log_acceptance"],
    "exact": [{"kind": "tvd_plus_plus"}],
    "uniform": [{"kind": "tvd_plus_plus", "estimator": "uniform"}],
    "opt": [{"kind": "rule", "rule": {"rule": "opt", "alpha": 0.2}}],
    "token_v3": [{"kind": "rule", "rule": {"rule": "token_v3", "alpha": 0.2}}],
    "lossy": [{"kind": "rule", "rule": {"rule": "lossy", "alpha": 0.2, "beta": "tuned"}}],
    "several": ["forward_kl", "cross_entropy", "jsd"],
}


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_term_needs_more_memory_than_it_is_given(name: str, bfloat16: bool):
    kinds = [{"kind": one} if isinstance(one, str) else one for one in OBJECTIVES[name]]
    terms = [TypeAdapter(Objective).validate_python(kind) for kind in kinds]
    found = bytes_per_entry(terms, bfloat16=bfloat16)
    least = {"token_v3": 44, "jsd": 36, "forward_kl": 20}.get(name, 12)
    assert least < found <= 48.5 * len(terms)  # and the gradient of the head


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
