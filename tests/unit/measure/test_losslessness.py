"""`verify` passes what is lossless and fails what is not; it compares with transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams
from paceline.measure.losslessness import (
    KeepsHalfOfTheRejected,
    Models,
    VerifyConfig,
    check_greedy,
    first_split,
    kept_tokens,
    reference_greedy,
    verify_models,
)
from paceline.models import wrap_model
from paceline.models.hf.base import HfModel
from paceline.models.hf.causal import HfDecoder
from support.fakes import TableModel
from support.models import tiny_hf

PROMPTS = [[1, 2], [3, 3], [4, 5]] * 10


def _models():
    return TableModel.random(8, 2, seed=1), TableModel.random(8, 2, seed=2)


def _config(**values):
    """In one batch: each text has a random stream of its own, so batches do not change it."""
    given = {"num_prompts": 30, "batch_size": 30} | values
    return VerifyConfig(target="t", draft="d", prompts="p.txt", **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.6, top_p=0.9), SamplingParams(top_k=4, repetition_penalty=1.2)],
)
def test_the_lossless_rule_passes(sampling):
    """n = 1,890 tokens in 16 cells; each sampler fails once in 10,000 seeds."""
    report = verify_models(*_models(), PROMPTS, _config(sampling=sampling))
    assert report.passed
    counts = report.distribution.counts
    assert counts["tokens"] + counts["border"] == 30 * 63


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, {"temperature": 0}, {"temperature": 0.5, "top_p": 0.8}])
def test_the_self_test_catches_the_broken_rule(drafts):
    report = verify_models(*_models(), PROMPTS, _config(self_test=True, draft_sampling=drafts))
    assert report.passed
    assert report.distribution.counts["tokens"] == 30 * 63
    assert report.broken_distribution is not None
    assert report.broken_distribution.p_value < 1e-4


def test_a_forced_end_of_text_is_not_taken_for_a_sample():
    """Outside top-k it would be impossible, so a correct pair would fail."""
    hf, draft = tiny_hf("bart", seed=0), wrap_model(tiny_hf("bart", seed=1))
    hf.generation_config.forced_eos_token_id = 7
    target = wrap_model(hf)
    target.eos_token_ids = ()  # every text reaches max_new_tokens
    config = _config(sampling=SamplingParams(top_k=3), max_new_tokens=4, num_cells=2)
    report = verify_models(target, draft, [[5, 6], [8, 9, 10]] * 10, config)
    assert report.greedy.passed
    assert report.distribution.counts["impossible"] == 0


def test_a_broken_rule_fails_the_greedy_check_and_the_place_is_named():
    check = check_greedy(
        Models(*_models(), _models()[0]), PROMPTS, _config(), KeepsHalfOfTheRejected()
    )
    assert not check.passed
    assert check.first_difference is not None
    assert check.first_difference.startswith("prompt ")


@pytest.mark.slow
def test_a_served_target_that_is_not_the_reference_fails_both_checks():
    target, draft = _models()
    wrong = TableModel.random(8, 2, seed=3)
    report = verify_models(wrong, draft, PROMPTS, _config(), reference=target)
    assert not report.greedy.passed
    assert not report.distribution.passed
    assert (report.word, report.exit_code) == ("FAILED", 1)


class Nudged(TableModel):
    """A target whose logits are rounded otherwise: `nudges` are added to each row of them."""

    nudges: torch.Tensor

    def look_up(self, contexts: torch.Tensor) -> torch.Tensor:
        return super().look_up(contexts) + self.nudges


def nudged(target: TableModel, nudges: list[float]) -> Nudged:
    served = Nudged(target._log_probs.exp())
    served.nudges = torch.tensor(nudges, dtype=torch.float64)
    return served


# tokens 1 and 2 tie at the border of top_k=2; the mass before token 2 is top_p=0.7
BORDER = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).repeat(4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "nudges"),
    [
        (SamplingParams(top_k=2), [0, 0, 1e-4, 0]),
        (SamplingParams(top_p=0.7), [0, 0, 0, 1e-4]),
        (SamplingParams(top_p=0.7), [-1e-4, 0, 1e-5, 0]),
    ],
)
def test_a_token_at_the_border_of_a_cut_does_not_fail_a_served_target_that_rounds(
    sampling: SamplingParams, nudges: list[float]
):
    """n = 1,890 tokens; each setting fails once in 10,000 seeds."""
    target, draft = TableModel(BORDER), TableModel.random(4, 1, seed=2)
    report = verify_models(
        *(nudged(target, nudges), draft, [[1], [2]] * 15, _config(sampling=sampling)),
        reference=target,
    )
    assert report.distribution.passed
    assert report.distribution.counts["impossible"] == 0
    assert report.distribution.counts["border"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingParams(top_k=2), SamplingParams(top_p=0.7)])
def test_a_token_beyond_the_tolerance_is_impossible(sampling: SamplingParams):
    """Token 1 has 0.21 and token 2 has 0.19; the served target exchanges them."""
    clear = torch.tensor([0.5, 0.21, 0.19, 0.1], dtype=torch.float64).repeat(4, 1)
    target, draft = TableModel(clear), TableModel.random(4, 1, seed=2)
    served = nudged(target, [0, -0.2, 0.2, 0])
    config = _config(sampling=sampling)
    check = verify_models(served, draft, [[1]] * 30, config, reference=target).distribution
    assert not check.passed
    assert check.counts["impossible"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "tolerance"),
    [(SamplingParams(top_k=3), 0.25), (SamplingParams(top_p=0.7), 1e-3)],
)
def test_border_tokens_do_not_hide_the_broken_rule(sampling: SamplingParams, tolerance: float):
    config = _config(self_test=True, sampling=sampling, tolerance=tolerance)
    assert verify_models(*_models(), PROMPTS, config).passed


def tied(penalised: bool) -> TableModel:
    """Token 0 is in every prompt; its log p ties with token 1's, with the penalty or without."""
    best = 0.5
    second = best**1.25 * (1 - 2e-5) if penalised else best - 1e-6
    rest = (1 - best - second) / 2
    row = torch.tensor([best, second, rest, rest], dtype=torch.float64).clamp(min=1e-9)
    return TableModel((row / row.sum()).repeat(4, 1))


@pytest.mark.parametrize("penalised", [True, False])
def test_a_tie_is_one_of_penalised_logits(penalised: bool):
    """With a penalty of 1.25, log 0.5 becomes log 0.42: the first token's tie, or a clear gap."""
    target = tied(penalised)
    config = _config(sampling=SamplingParams(repetition_penalty=1.25), max_new_tokens=2)
    # the served target takes the other one of the two
    served = nudged(target, [-1e-4, 0, 0, 0] if penalised else [0.5, 0, 0, 0])
    draft = TableModel.random(4, 1, seed=2)
    check = check_greedy(Models(served, draft, target), [[0]] * 4, config, Lossless())
    assert check.counts["identical"] == 0
    assert (check.counts["ties"], check.passed) == ((4, True) if penalised else (0, False))


def test_kept_tokens_are_those_of_every_rounding_and_of_any():
    """top-k 2 of (0, -1, -1.05, -3): within 0.1 the second place is open, within 0.01 it is not."""
    logits = torch.tensor([[0.0, -1.0, -1.05, -3.0]])
    sure, possible = kept_tokens(logits, SamplingParams(top_k=2), 0.1)
    assert sure.tolist() == [[True, False, False, False]]
    assert possible.tolist() == [[True, True, True, False]]
    sure, possible = kept_tokens(logits, SamplingParams(top_k=2), 0.01)
    assert sure.tolist() == possible.tolist() == [[True, True, False, False]]
    # 0.5, 0.3, 0.2: the mass before the last is 0.8, and 0.7984 or 0.8016 at odds of exp(0.01)
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, last in ((0.79, (False, False)), (0.8, (False, True)), (0.81, (True, True))):
        sure, possible = kept_tokens(logits, SamplingParams(top_p=top_p), 0.01)
        assert (bool(sure[0, 2]), bool(possible[0, 2])) == last
    sure, possible = kept_tokens(logits, SamplingParams(temperature=0), 0.6)
    assert (sure.tolist(), possible.tolist()) == ([[False] * 3], [[True, True, False]])


def test_first_split_finds_a_missing_end_too():
    assert first_split([1, 2, 3], [1, 2, 3]) is None
    assert first_split([1, 2, 3], [1, 5, 3]) == 1
    assert first_split([1, 2, 3], [1, 2]) == 2


RAGGED = [[5, 6, 7, 9, 11, 4, 8], [8, 9, 10], [12, 3, 14, 9, 5]] * 5


def _short(**values: Any) -> VerifyConfig:
    given = {"num_prompts": 15, "batch_size": 5, "max_new_tokens": 12, "num_cells": 4}
    return _config(**given | values)


class SessionsAlone:
    """A model that offers its sessions only, so that verify has to compare with them."""

    def __init__(self, model: HfModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def another_hf(changes: dict[str, Any], kind: str) -> Any:
    """The weights of `tiny_hf(kind)` under another configuration."""
    first = tiny_hf(kind, seed=0)
    other = type(first)(type(first.config).from_dict(first.config.to_dict() | changes))
    other.load_state_dict(first.state_dict())
    return other.eval()


class Shifted(HfDecoder):
    """Positions twice as far apart as they are."""

    def __call__(self, tokens_BN: Tensor, cache: Any, ends_B: Tensor | None, keep: int) -> Tensor:
        first = cache.get_seq_length()
        places_N = 2 * torch.arange(first, first + tokens_BN.shape[1])
        return self.hf(
            input_ids=tokens_BN,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            position_ids=places_N[None].expand(len(tokens_BN), -1),
        ).logits


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "positions": ("llama", Shifted),
    "window": ("mistral", lambda _: HfDecoder(another_hf({"sliding_window": 3}, "mistral"))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_target_whose_sessions_are_wrong_fails_although_it_agrees_with_itself(mutant: str):
    """Their own decoder computes another model than `hf` does; a comparison with it passes."""
    kind, wrong = MUTANTS[mutant]
    model, draft = (wrap_model(tiny_hf(kind, seed=seed)) for seed in (0, 1))
    broken = model.decoding_with(wrong(model.hf))
    # texts one by one: the mutants know no ragged batches
    settings = _short(batch_size=1, num_prompts=2, max_new_tokens=14)
    itself: Any = SessionsAlone(broken)
    before = verify_models(broken, draft, RAGGED, settings, reference=itself)
    assert before.greedy.passed
    assert before.distribution.counts["impossible"] == 0
    found = verify_models(broken, draft, RAGGED, settings, reference=broken)
    assert not found.greedy.passed
    assert not found.passed


@pytest.mark.parametrize(
    ("kind", "penalty"),
    [("mistral", 1.3), ("gpt2", 1.0), ("t5", 1.0), ("bart", 1.3), ("qwen3_5_text", 1.0)],
)
def test_right_sessions_pass(kind: str, penalty: float):
    """n of at most 88 tokens in 4 cells; each fails once in 10,000 seeds."""
    model, draft = (wrap_model(tiny_hf(kind, seed=seed)) for seed in (0, 1))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=penalty)
    settings = _short(sampling=sampling, num_prompts=8)
    found = verify_models(model, draft, RAGGED, settings)
    assert found.greedy.passed, found.greedy.first_difference
    assert found.greedy.counts["identical"] + found.greedy.counts["ties"] == 8
    assert found.distribution.passed
    assert "transformers" in found.reference


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"suppress_tokens": [3, 9], "bad_words_ids": [[5]]}),
        ("llama", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_beams": 3}),
        ("llama", {"bad_words_ids": [[5], [6, 7]], "temperature": 0.1, "do_sample": True}),
        ("llama", {"prompt_lookup_num_tokens": 3, "cache_implementation": "static"}),
        (
            "llama",
            {"num_return_sequences": 3, "do_sample": True, "return_dict_in_generate": True}
            | {"output_scores": True},
        ),
        ("t5", {"suppress_tokens": [3, 9]}),
        ("bart", {"forced_bos_token_id": 6, "forced_eos_token_id": 2, "num_beams": 4}),
        ("bart", {"min_length": 9, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore:the generation config")
def test_settings_of_a_model_are_those_that_paceline_applies(kind: str, settings: dict[str, Any]):
    pair = [tiny_hf(kind, seed=seed) for seed in (0, 1)]
    for hf in pair:
        for name, value in settings.items():
            setattr(hf.generation_config, name, value)
    model, draft = map(wrap_model, pair)
    kept = model.hf.generation_config.to_dict()
    found = check_greedy(Models(model, draft, model), RAGGED[:3], _short(), Lossless())
    assert found.passed, found.first_difference
    assert model.hf.generation_config.to_dict() == kept


def test_a_text_may_end_with_the_context():
    model = wrap_model(tiny_hf("llama", seed=0))
    room = model.max_length
    assert room is not None
    prompts = [[5] * (room - 3), [6, 7, 8]]
    settings = 9, SamplingParams(), model.vocab_size
    lengths = [len(reference_greedy(model, prompt, *settings)) for prompt in prompts]
    assert lengths == [3, 9]
    found = verify_models(
        model, model, [[5] * (room - 8), *RAGGED], _short(max_new_tokens=20, gamma=2)
    )
    assert found.greedy.passed, found.greedy.first_difference
