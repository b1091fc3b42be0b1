"""What the mathematics, the sessions and the decoders give on tiny models: written as JSON.

Uses the public surface alone, so that it runs on either of two commits that are compared.
"""

import contextlib
import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import paceline  # noqa: F401 - before torch, whose libraries PACELINE_CPU limits

# isort: split
import torch
from torch import Tensor

from paceline.core import divergences
from paceline.core.rule_base import Position
from paceline.core.rules import BiLDRule, Diff, Lossless, Opt
from paceline.core.sampling import SamplingParams, to_probs
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    Confident,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.models import prepare_for_decoding, wrap_model
from support.models import tiny_hf, tiny_pair
from support.rules import ALL_RULES

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "t1": SamplingParams(),
    "t0.7": SamplingParams(temperature=0.7),
    "top": SamplingParams(temperature=1.2, top_p=0.8, top_k=20),
    "penalty": SamplingParams(temperature=0.9, repetition_penalty=1.3),
    "greedy_penalty": SamplingParams(temperature=0, repetition_penalty=1.3),
}
PROMPTS = [[3, 4, 5], [7], [9, 9, 8, 7, 6, 5, 4], [10, 11], [12, 13, 14, 15]]


def digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def prepared(model: Any, **settings: Any) -> Any:
    return prepare_for_decoding(model, **settings)


def core() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    p_logits, q_logits = (2 * torch.randn(6, 37, generator=rng) for _ in "pq")
    found: dict[str, Any] = {"probs": {}, "rules": {}, "divergences": {}}
    for name, sampling in SAMPLINGS.items():
        found["probs"][name] = digest(to_probs(p_logits, sampling))
    p, q = (logits.softmax(-1) for logits in (p_logits, q_logits))
    raws = {"target_raw": p_logits.mul(0.8).softmax(-1), "draft_raw": q_logits.mul(0.8).softmax(-1)}
    for rule in ALL_RULES:
        for kind, raw in (("plain", {}), ("raw", raws)):
            parts = [
                rule.accept_at(Position.of(p, q, **raw)),
                rule.residual_at(Position.of(p, q, **raw)),
            ]
            parts += [rule.induced_at(Position.of(p, q, **raw))]
            pi = rule.pi_at(Position.of(p, q, **raw))
            found["rules"][f"{rule} {kind}"] = [
                *map(digest, parts),
                None if pi is None else digest(pi),
            ]
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd", "negative_log_acceptance"):
        draft = q_logits.clone().requires_grad_()
        loss = getattr(divergences, name)(p_logits.log_softmax(-1), draft.log_softmax(-1))
        loss.sum().backward()
        found["divergences"][name] = [digest(loss), digest(draft.grad)]  # pyright: ignore
    return found


def session(model: Any) -> list[str]:
    """Logits of a session that reads, forgets, refills and keeps rows."""
    one = model.start_session()
    found = [digest(one.prefill([[3, 4, 5], [6], [7, 8]]))]
    found.append(digest(one.extend(torch.tensor([[9, 10], [11, 12], [13, 14]]))))
    one.rollback([0, 2, 1])
    found.append(digest(one.extend(torch.tensor([[15], [16], [17]]))))
    found.append(digest(one.refill([1], [[20, 21, 22, 23]])))
    found.append(digest(one.extend(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))))
    one.keep_rows([2, 0])
    found.append(digest(one.extend(torch.tensor([[18], [19]]))))
    return found


def texts(decoder: Any, **options: Any) -> list[Any]:
    generations = decoder.generate(PROMPTS, **{"max_new_tokens": 14, "seed": 5} | options)
    return [
        [g.tokens, g.stop_reason, {k: str(v) for k, v in vars(g.stats).items()}]
        for g in generations
    ]


def sessions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "opt"):
        found[name] = session(wrap_model(tiny_hf(name)))
        found[f"{name} prepared"] = session(prepared(wrap_model(tiny_hf(name))))
        rounded = wrap_model(tiny_hf(name).bfloat16().float())
        found[f"{name} in 16 bits"] = session(prepared(rounded))
        found[f"{name} bfloat16"] = session(prepared(wrap_model(tiny_hf(name).bfloat16())))
    with contextlib.suppress(Exception):  # where there is no compiler
        found["int8"] = session(prepared(wrap_model(tiny_hf("llama")), weights="int8"))
    limit = torch.arange(0, 60, 2)
    limited = wrap_model(tiny_hf("llama").bfloat16().float(), None, limit)
    found["limited"] = session(limited)
    found["limited prepared"] = session(prepared(limited))
    return found


def decoders() -> dict[str, Any]:
    """Every rule at every sampling, and every other way of decoding."""
    found: dict[str, Any] = {}
    plain = tiny_pair(initializer_range=0.05)
    for model in plain:
        model.hf.to(torch.bfloat16).float()
    fast = tuple(prepared(model) for model in plain)
    for kind, (target, draft) in (("plain", plain), ("fast", fast)):
        for name, sampling in SAMPLINGS.items():
            found[f"{kind} {name} alone"] = texts(AutoregressiveDecoder(target, sampling))
            for rule in ALL_RULES:
                decoder = SpeculativeDecoder(target, draft, rule, 3, sampling)
                found[f"{kind} {name} {rule}"] = texts(decoder)
        found |= {f"{kind} {name}": value for name, value in others(target, draft).items()}
    for name in ("gpt2", "mistral", "opt"):
        target, draft = tiny_pair(name)
        found[name] = texts(SpeculativeDecoder(target, draft, Lossless(), 3))
    return found


def others(target: Any, draft: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("greedy", "t0.7", "penalty"):
        sampling = SAMPLINGS[name]
        pair = (target, draft)
        ways: dict[str, Any] = {
            "token": TokenCascade(*pair, 0.8, sampling),
            "sequence": SequenceCascade(*pair, 0.9, sampling),
            "sequence normalised": SequenceCascade(*pair, 0.9, sampling, normalise=True),
            "bild": BigLittleDecoder(*pair, 0.2, 3.0, sampling),
            "oracle": OracleCascade(*pair, Diff(0.1), sampling),
            "oracle bild": OracleCascade(*pair, BiLDRule(1.0), sampling),
            "confident": SpeculativeDecoder(*pair, Lossless(), 4, sampling, policy=Confident(0.1)),
            "confident opt": SpeculativeDecoder(
                *pair, Opt(0.4), 4, sampling, policy=Confident(0.1)
            ),
            "greedy drafts": SpeculativeDecoder(
                *pair, Lossless(), 3, sampling, draft_sampling=SamplingParams(temperature=0)
            ),
        }
        for way, decoder in ways.items():
            found[f"{name} {way}"] = texts(decoder)
            found[f"{name} {way} seats"] = texts(decoder, batch_size=2, eos_token_ids=[7, 11])
            found[f"{name} {way} stream"] = [
                [list(block.tokens), list(block.sources), block.num_drafted]
                for block in decoder.stream([3, 4, 5], 10, seed=2)
            ]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recorded = {"core": core(), "sessions": sessions(), "decoders": decoders()}
    Path(sys.argv[1]).write_text(json.dumps(recorded, default=str), "utf-8")
