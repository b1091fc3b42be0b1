"""With `bonus="target"`, all triples of tokens of a text against their exact joint law.

The first token and every bonus token follow the target, drafted positions the rule: as vLLM decodes
with the plugin. n = 3,000 texts from fixed seeds; one chi-square over the first three tokens (with
gamma 1 the third is a bonus token where the second was kept) and one for each pair of neighbouring
places, and failure below 1e-4 each, which are the odds of a false alarm under other seeds; about
120 p-values. Mutants that take one of the two from the rule are caught.
"""

from itertools import cycle
from unittest.mock import Mock

import pytest

from paceline.core.backend import using
from paceline.core.rule_base import Bonus, Rule
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, TokenV3
from paceline.decode import Confident, SpeculativeDecoder, speculative
from paceline.errors import UsageError
from paceline.native.kernels import NativeBackend
from support import exact
from support.rules import ODDS, PROMPT, PYTORCH, THRESHOLDS, Pair, exact_models, length, stating

COUNT = 3000
PLAIN = exact.Shaping()
COOL = exact.Shaping(temperature=0.7)
GREEDY = exact.Shaping(temperature=0)


def untempered(vectors: exact.RuleVectors) -> exact.Vectors:
    return lambda _p, q, p_raw, _q_raw: vectors(p_raw, q)


def aimed(name: str, alpha: float) -> exact.Vectors:
    return exact.aimed_vectors(exact.AIMS[name](alpha))


RULES: list[tuple[Rule, exact.Vectors]] = [
    (Lossless(), exact.near(exact.lossless)),
    (Lenient("linear", 0.3), exact.near(exact.lenient("linear", 0.3))),
    (Lenient("square", 0.5), exact.near(exact.lenient("square", 0.5))),
    (Lenient("exponential", 0.4), exact.near(exact.lenient("exponential", 0.4))),
    (Lossy(0.5, 1.6), exact.near(exact.lossy(0.5, 1.6))),
    (Lossy(0.6, "tuned"), aimed("tuned", 0.6)),
    *(
        (stating(name, alpha), aimed(name, alpha))
        for name, alpha in THRESHOLDS.items()
        if name != "tuned"
    ),
]
rules = pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])
BACKENDS = {"native": NativeBackend(), "torch": PYTORCH}


def p_value(
    decoder: SpeculativeDecoder,
    vectors: exact.Vectors,
    given: exact.Models,
    prompt: list[int] = PROMPT,
    batch_size: int | None = None,
) -> float:
    """The smallest of the triples' and the pairs' p-values."""
    size = length(decoder.gamma)
    found = decoder.generate([prompt] * COUNT, size, eos_token_ids=[], batch_size=batch_size)
    texts = [one.tokens for one in found]
    expected = exact.target_bonus_texts(
        given, vectors, gamma=decoder.gamma, prompt=tuple(prompt), length=size
    )
    triples = exact.beginning_p_value(texts, expected, 3)
    return min(triples, *exact.pair_p_values(texts, expected))


# Each rule is here at one gamma by one backend, by turns, and below at another gamma.
@pytest.mark.parametrize(
    ("rule", "vectors", "gamma", "backend"),
    [(*rule, *way) for rule, way in zip(RULES, cycle([(1, "torch"), (3, "native")]), strict=False)],
    ids=[str(rule) for rule, _ in RULES],
)
def test_all_triples_follow_the_target_where_nothing_is_drafted_and_else_the_rule(
    rule: Rule, vectors: exact.Vectors, gamma: int, backend: str
):
    pair = Pair(1)
    with using(BACKENDS[backend]):
        decoder = SpeculativeDecoder(pair.target, pair.draft, rule, gamma, bonus="target")
        assert p_value(decoder, vectors, exact_models(PLAIN)) > ODDS


@rules
def test_so_do_tempered_texts_in_small_batches_of_drafts_that_end_early(
    rule: Rule, vectors: exact.Vectors
):
    """The policy is never sure enough to stop here, but its drafts come one by one."""
    pair = Pair(1, COOL)
    decoder = SpeculativeDecoder(
        *(pair.target, pair.draft, rule, 2, pair.sampling, Confident(0.01)), bonus="target"
    )
    assert p_value(decoder, vectors, exact_models(COOL), [0], batch_size=700) > ODDS


@pytest.mark.parametrize(
    ("rule", "vectors"),
    [
        (Lenient("linear", 0.3), untempered(exact.lenient_at_0("linear", 0.3))),
        (Lossy(0.6, "tuned"), aimed("tuned", 0.6)),
        (TokenV3(0.5), aimed("token_v3", 0.5)),
    ],
    ids=["lenient", "lossy tuned", "token_v3"],
)
def test_at_temperature_0_the_bonus_token_is_the_targets_best(rule: Rule, vectors: exact.Vectors):
    """The draft samples."""
    pair = Pair(1, GREEDY, PLAIN)
    decoder = SpeculativeDecoder(
        *(pair.target, pair.draft, rule, 1, pair.sampling),
        draft_sampling=pair.draft_sampling,
        bonus="target",
    )
    assert p_value(decoder, vectors, exact_models(GREEDY, PLAIN)) > ODDS


class FirstFromTheRule(SpeculativeDecoder):
    """Drafts the first token."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given, bonus="target")  # pyright: ignore[reportArgumentType]
        self.verifies_first = True


class BonusFromTheRule(SpeculativeDecoder):
    """Takes the bonus token from pi, and the first from the target."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # pyright: ignore[reportArgumentType]
        self.verifies_first = False


AIMED = [each for each in RULES if each[0].needs_draft_at_bonus]
MUTANTS = cycle([FirstFromTheRule, BonusFromTheRule, SpeculativeDecoder])


@pytest.mark.parametrize(
    ("rule", "vectors", "mutant"),
    [(*each, mutant) for each, mutant in zip(AIMED, MUTANTS, strict=False)],
    ids=[str(rule) for rule, _ in AIMED],
)
def test_a_bonus_or_a_first_token_of_the_rule_is_caught(
    rule: Rule, vectors: exact.Vectors, mutant: type[SpeculativeDecoder]
):
    """Behind token 0 every aim is far from the target; the rules take the mutants by turns."""
    pair = Pair(1)
    decoder = mutant(pair.target, pair.draft, rule, 1)
    assert p_value(decoder, vectors, exact_models(PLAIN), [3, 0]) < ODDS


def test_streamed_blocks_are_those_of_generate():
    pair = Pair(1)
    decoder = SpeculativeDecoder(pair.target, pair.draft, TokenV3(0.5), 3, bonus="target")
    for seed in range(20):
        (whole,) = decoder.generate([PROMPT], 12, seed=seed, eos_token_ids=[])
        blocks = list(decoder.stream(PROMPT, 12, seed=seed, eos_token_ids=[]))
        assert [token for block in blocks for token in block.tokens] == whole.tokens
        assert blocks[0].num_drafted == 0
        assert whole.stats.num_prefill_tokens == 1


@pytest.mark.parametrize(("bonus", "more"), [("rule", 1), ("target", 0)])
def test_the_draft_makes_no_pass_behind_its_last_token(
    bonus: Bonus, more: int, monkeypatch: pytest.MonkeyPatch
):
    drawn = Mock(wraps=speculative.draw)
    monkeypatch.setattr(speculative, "draw", drawn)
    pair = Pair(1)
    decoder = SpeculativeDecoder(pair.target, pair.draft, Chow(0.52), 2, bonus=bonus)
    decoder.generate([PROMPT], 13, eos_token_ids=[])
    plans = [call.args[1].plan for call in drawn.call_args_list]
    assert [plan.num_passes - plan.num_tokens for plan in plans] == [more] * len(plans)


def test_another_bonus_is_refused():
    pair = Pair(1)
    with pytest.raises(UsageError, match="bonus must be 'rule' or 'target', got 'draft'"):
        SpeculativeDecoder(pair.target, pair.draft, bonus="draft")  # pyright: ignore[reportArgumentType]
