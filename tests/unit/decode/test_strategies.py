"""A configuration stands for the decoder that one would have made by hand, and survives a file."""

from pathlib import Path

import pytest
import torch

from paceline.config import load_config, to_yaml
from paceline.core.rules import Chow, Diff, Lossy, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import (
    AutoregressiveDecoder,
    BigLittleDecoder,
    Confident,
    OracleCascade,
    SequenceCascade,
    SpeculativeDecoder,
    TokenCascade,
)
from paceline.decode.decoder import Decoder
from paceline.decode.strategies import DecodingConfig, build_decoder
from paceline.errors import UsageError
from support.fakes import TableModel

TABLES = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).softmax(-1).double()
TARGET, DRAFT = TableModel(TABLES[0]), TableModel(TABLES[1])
WARM = SamplingParams(temperature=0.8)

CASES: dict[str, tuple[list[str], Decoder]] = {
    "nothing said": ([], SpeculativeDecoder(TARGET, DRAFT, gamma=4, sampling=WARM)),
    "target alone": (["strategy.strategy=autoregressive"], AutoregressiveDecoder(TARGET, WARM)),
    "rule and policy": (
        [
            "strategy.rule={rule: token_v3, alpha: 0.4}",
            "strategy.num_speculative_tokens=3",
            "strategy.policy={policy: confident, threshold: 0.3}",
        ],
        SpeculativeDecoder(TARGET, DRAFT, TokenV3(0.4), 3, WARM, Confident(0.3)),
    ),
    "tuned": (
        [
            "strategy.strategy=speculative",
            "strategy.rule={rule: lossy, alpha: 0.4, beta: tuned}",
        ],
        SpeculativeDecoder(TARGET, DRAFT, Lossy(0.4, "tuned"), 4, WARM),
    ),
    "greedy drafts": (
        ["strategy.draft_sampling.temperature=0", "sampling.repetition_penalty=1.2"],
        SpeculativeDecoder(
            *(TARGET, DRAFT),
            gamma=4,
            sampling=SamplingParams(temperature=0.8, repetition_penalty=1.2),
            draft_sampling=SamplingParams(temperature=0),
        ),
    ),
    "token cascade": (
        ["strategy.strategy=token_cascade", "strategy.alpha=0.6"],
        TokenCascade(TARGET, DRAFT, 0.6, WARM),
    ),
    "sequence cascade": (
        ["strategy.strategy=sequence_cascade", "strategy.alpha=0.7", "strategy.normalise=true"],
        SequenceCascade(TARGET, DRAFT, 0.7, WARM, normalise=True),
    ),
    "BiLD": (
        ["strategy.strategy=big_little", "strategy.fallback=0.3", "strategy.rollback=1.5"],
        BigLittleDecoder(TARGET, DRAFT, 0.3, 1.5, WARM),
    ),
    "oracle": (
        ["strategy.strategy=oracle_cascade", "strategy.rule={rule: chow, alpha: 0.6}"],
        OracleCascade(TARGET, DRAFT, Chow(0.6), WARM),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_gives_the_texts_of_the_decoder_that_it_stands_for(
    case: str, tmp_path: Path
):
    overrides, by_hand = CASES[case]
    config = load_config(DecodingConfig, overrides=[*overrides, "sampling.temperature=0.8"])
    path = tmp_path / "decoding.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(DecodingConfig, path) == config
    made = build_decoder(config, TARGET, DRAFT)
    prompts = [[1, 2], [3], [0, 5, 4]]
    found = made.generate(prompts, 12)
    assert found == by_hand.generate(prompts, 12)
    assert type(made) is type(by_hand)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TokenCascade(TARGET, DRAFT, 1.2), "alpha"),
        (lambda: SequenceCascade(TARGET, DRAFT, -0.1), "alpha"),
        (lambda: BigLittleDecoder(TARGET, DRAFT, 2.0, 1.0), "fallback"),
        (lambda: BigLittleDecoder(TARGET, DRAFT, 0.5, float("nan")), "threshold"),
        (lambda: OracleCascade(TARGET, DRAFT, TokenV3(0.5)), "whole token from one model"),
        (
            lambda: load_config(
                DecodingConfig, overrides=["strategy.draft_sampling={repetition_penalty: 1.3}"]
            ),
            "leave it out",
        ),
    ],
)
def test_a_threshold_out_of_its_range_or_a_rule_for_single_tokens_is_refused(make, names: str):
    with pytest.raises(UsageError, match=names):
        make()


def counts(decoder: Decoder, length: int = 30) -> DecodeStats:
    return sum(
        (one.stats for one in decoder.generate([[1]] * 20, length, eos_token_ids=[])), DecodeStats()
    )


def test_every_token_is_counted_once_whoever_wrote_it():
    for _, decoder in CASES.values():
        stats = counts(decoder)
        assert stats.num_prefill_tokens + stats.num_emitted == 20 * 30


def test_a_cascade_that_always_keeps_never_calls_the_target_and_one_that_never_does_always():
    kept = counts(SequenceCascade(TARGET, DRAFT, 1.0))
    assert (kept.num_target_calls, kept.num_kept, kept.deferral_rate) == (0, 600, 0.0)
    sure = counts(TokenCascade(TARGET, DRAFT, 1.0))
    # ten tokens of the draft, then one of the target; the last block has nothing left to ask for
    assert (sure.num_deferred, sure.num_target_calls) == (40, 40)
    unsure = counts(TokenCascade(TARGET, DRAFT, 0.0))
    assert (unsure.num_kept, unsure.deferral_rate) == (0, 1.0)


def test_an_oracle_counts_what_it_took_from_the_target():
    stats = counts(OracleCascade(TARGET, DRAFT, Diff(0.0)))
    assert 0 < stats.num_deferred < 600
    assert stats.num_target_calls == stats.num_deferred
    assert stats.deferral_rate == stats.num_deferred / 600


def test_bild_rolls_back_and_says_how_much():
    stats = counts(BigLittleDecoder(TARGET, DRAFT, 0.1, 1.9))
    assert stats.num_recovered > 0
    assert stats.num_accepted > 0
    assert 0 < stats.num_recovered < stats.num_examined


def test_what_a_sure_draft_ends_itself_the_target_never_reads():
    counts_up = TableModel(torch.eye(6).roll(1, 1).double() * 0.9 + 0.1 / 6)
    decoder = TokenCascade(TARGET, counts_up, 1.0, SamplingParams(temperature=0))
    (free,) = decoder.generate([[1]], 12, eos_token_ids=[])
    stop = free.tokens[3]
    (found,) = decoder.generate([[1]], 12, eos_token_ids=[stop])
    assert found.tokens == free.tokens[:4]
    assert found.stop_reason == "eos"
    assert (found.stats.num_kept, found.stats.num_target_calls) == (4, 0)
