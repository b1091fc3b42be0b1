"""The number of tokens per chunk follows the memory of a GPU, which the tests only pretend."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.config import validate
from paceline.core.fused import Head, chunked_loss
from paceline.errors import ConfigError
from paceline.train import AlignConfig
from paceline.train.loss import ChunkLoss, TargetScores, chunk_size
from paceline.train.objectives import Objective, policies_of, uniforms_of_terms

GIB = 2**30
VOCABULARY = 128_256


def chosen(configured: Any = "auto", device: str = "cuda", entries: int = VOCABULARY) -> int:
    return chunk_size(configured, torch.device(device), entries, 1)


def test_much_memory_gives_the_largest_chunk_and_little_the_smallest(
    monkeypatch: pytest.MonkeyPatch,
):
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


def test_a_number_and_a_cpu_ask_no_device():
    assert chosen(1000) == 1000
    assert chosen(device="cpu") == 256


def test_the_setting_is_a_number_or_auto():
    given: dict[str, Any] = {"target": "t", "draft": "d", "output": "o", "num_steps": 1}
    given["data"] = {"train": "x"}
    assert validate(AlignConfig, given).chunk_tokens == "auto"
    assert validate(AlignConfig, given | {"chunk_tokens": 64}).chunk_tokens == 64
    for wrong in (0, "many"):
        with pytest.raises(ConfigError, match="chunk_tokens"):
            validate(AlignConfig, given | {"chunk_tokens": wrong})


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
