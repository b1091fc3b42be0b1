"""Rules beside the laws that they should follow, settings, and how often a decoder leaves a law."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from paceline.core.rule_base import Bonus
from paceline.core.rules import BiLDRule, Chow, Lenient, Lossless, Lossy, Rule, TokenV3
from paceline.decode import Confident, SpeculativeDecoder
from paceline.decode.draft_policies import DraftPolicy
from paceline.models import HfModel
from paceline.native.kernels import NativeBackend
from support import exact
from support.borders import Law, num_wrong, walks
from support.fakes import Cautious
from support.rules import PYTORCH, THRESHOLDS, Pair, length, stating

COUNT = 400
CAUGHT = 4
"""A mutant leaves at least so many paths."""
PROMPTS = ((3, 1), (0,), (2,), (4, 4, 1))
LOOSE: dict[str, tuple[Rule, exact.Vectors]] = {
    str(rule): (rule, exact.near(vectors))
    for rule, vectors in [
        (Lossless(), exact.lossless),
        (Lenient("linear", 0.3), exact.lenient("linear", 0.3)),
        (Lenient("square", 0.6), exact.lenient("square", 0.6)),
        (Lenient("exponential", 0.3), exact.lenient("exponential", 0.3)),
        (Lossy(0.6), exact.lossy(0.6)),
        (Lossy(0.5, 1.6), exact.lossy(0.5, 1.6)),
        (Lossy(0.7, 0.4), exact.lossy(0.7, 0.4)),
    ]
}
AT_0: dict[str, tuple[Rule, exact.Vectors]] = {
    str(rule): (rule, lambda _p, q, p_raw, _q_raw, vectors=vectors: vectors(p_raw, q))
    for rule, vectors in [
        (Lenient("linear", 0.3), exact.lenient_at_0("linear", 0.3)),
        (Lenient("square", 0.5), exact.lenient_at_0("square", 0.5)),
        (Lenient("exponential", 0.4), exact.lenient_at_0("exponential", 0.4)),
        (Lossy(0.6), exact.lossy_at_0(0.6)),
        (Lossy(0.8, 1.6), exact.lossy_at_0(0.8)),
    ]
}
AIMED: dict[str, tuple[Rule, exact.Aim]] = {
    name: (stating(name, alpha), exact.AIMS[name](alpha)) for name, alpha in THRESHOLDS.items()
}
RULES: list[tuple[Rule, exact.Aim | None]] = [
    (Lossless(), None),
    (Chow(0.5), exact.AIMS["chow"](0.5)),
    (TokenV3(0.5), exact.AIMS["token_v3"](0.5)),
    (BiLDRule(1.45), exact.AIMS["bild"](1.45)),
]
"""Of random transformers; None: lossless."""
PLAIN = exact.Shaping()
COOL = exact.Shaping(temperature=0.7)
GREEDY = exact.Shaping(temperature=0)
ALL = exact.Shaping(temperature=1.3, top_k=4, top_p=0.9, repetition_penalty=1.2)
Shapings = tuple[exact.Shaping, exact.Shaping | None]
"""How the target samples, and the draft; None: as the target."""
SETTINGS: dict[str, Shapings] = {
    "plain": (PLAIN, None),
    "cool": (COOL, None),
    "all": (ALL, None),
    "greedy drafts": (PLAIN, GREEDY),
    "other drafts": (ALL, exact.Shaping(temperature=0.6, top_p=0.8)),
}
MORE: dict[str, Shapings] = {
    "top_k": (exact.Shaping(top_k=3), None),
    "top_p": (exact.Shaping(temperature=0.7, top_p=0.85), None),
    "penalty": (exact.Shaping(repetition_penalty=1.5), None),
    "greedy at 0.7": (COOL, GREEDY),
    "cold": (PLAIN, exact.Shaping(temperature=0.3)),
    "hot": (COOL, exact.Shaping(temperature=1.5)),
    "few": (PLAIN, exact.Shaping(top_k=2)),
    "nucleus": (COOL, exact.Shaping(temperature=1.2, top_p=0.6)),
    "whole under top-k": (exact.Shaping(top_k=3), PLAIN),
    "greedy under a penalty": (exact.Shaping(repetition_penalty=1.5), GREEDY),
}
# the best token for the target, whatever the draft does; filters would leave it alone
AT_TEMPERATURE_0: dict[str, Shapings] = {
    "greedy": (GREEDY, PLAIN),
    "greedy, penalty": (exact.Shaping(temperature=0, repetition_penalty=1.5), PLAIN),
    "greedy, filters": (exact.Shaping(temperature=0, top_k=1, top_p=0.1), PLAIN),
    "both greedy": (GREEDY, None),
}
POLICIES: dict[str, DraftPolicy] = {
    "confident": Confident(0.4),
    "cautious": Cautious(0.4),
}
# order of the models, bonus, backend, batch size
WAYS: list[tuple[int, Bonus, Any, int | None]] = [
    (1, "rule", PYTORCH, None),
    (2, "target", NativeBackend(), None),
    (1, "rule", NativeBackend(), 150),
    (1, "target", PYTORCH, None),
    (2, "rule", NativeBackend(), 90),
    (1, "rule", NativeBackend(), None),
]


def law(
    pair: Pair, name: str, gamma: int, bonus: Bonus = "rule", size: int | None = None
) -> tuple[Rule, Law]:
    """A rule by its name, and what its text follows."""
    aim = None
    if name in AIMED:
        rule, aim = AIMED[name]
        vectors = exact.aimed_vectors(aim)
    else:
        at_0 = pair.shaping.temperature == 0
        rule, vectors = (AT_0 if at_0 else LOOSE)[name]
    stated = Law(
        pair.exact,
        vectors,
        gamma,
        size or length(gamma),
        aim if bonus == "rule" else None,
        first_from_target=rule.exact or bonus == "target",
    )
    return rule, stated


def give_every_token_a_chance(hf: Any) -> None:
    """Make a head of the model's own smaller."""
    head = hf.get_output_embeddings()
    if head.weight is not hf.get_input_embeddings().weight:
        head.weight.data *= 0.35


def next_token(model: HfModel, source: tuple[int, ...] = ()) -> exact.NextToken:
    """By plain passes; a text of an encoder-decoder stands behind its source."""

    @cache
    def probs(text: tuple[int, ...]) -> exact.Distribution:
        batch = model.trial_batch(text[len(source) :], source)
        with torch.inference_mode():
            return model.plain_logits(batch)[0, -1].double().softmax(-1).tolist()

    return probs


def wrong(
    pair: Pair,
    rule: Rule,
    stated: Law,
    bonus: Bonus = "rule",
    batch_size: int | None = None,
    kind: type[SpeculativeDecoder] = SpeculativeDecoder,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
) -> int:
    decoder = kind(
        *(pair.target, pair.draft, rule, stated.gamma, pair.sampling),
        policy=stated.policy,
        draft_sampling=pair.draft_sampling,
        bonus=bonus,
    )
    return num_wrong(decoder, walks(stated, prompts, COUNT), batch_size)
