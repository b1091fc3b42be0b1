"""Where a text ends: stop tokens, budgets and contexts, inside blocks and at their edges."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.rules import Chow
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.cascade import OracleCascade, SequenceCascade, TokenCascade
from paceline.errors import (
    ContextLengthError,
    ModelLoadError,
    PromptError,
    UsageError,
    VocabularyMismatchError,
)
from paceline.measure.acceptance import forced_logits
from paceline.measure.perplexity import document_nats
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.hf.base import HfModel
from paceline.models.prepare import with_cuda_graphs
from support.fakes import TableModel
from support.models import generated, tiny_hf

GREEDY = SamplingParams(temperature=0)


def chain(successors: list[int], **options: object) -> TableModel:
    """After token t always comes successors[t]."""
    table = torch.zeros(len(successors), len(successors))
    table[torch.arange(len(successors)), torch.tensor(successors)] = 1
    return TableModel(table, **options)  # pyright: ignore[reportArgumentType]


# 0 1 2 3 4 5 0 1 2 ...; the draft errs once a round: it says 1 after 4.
CYCLE = [1, 2, 3, 4, 5, 0]
DRAFT_CYCLE = [1, 2, 3, 4, 1, 0]


# transformers#28508: nothing may follow an accepted stop token.
@pytest.mark.parametrize(
    ("stop", "gamma", "stats"),
    [
        # the first token, from the pass over the prompt
        (1, 3, DecodeStats(num_prefill_tokens=1)),
        # accepted in the middle of the block 2 3 4: the 4 behind it is drafted and judged, not kept
        (
            3,
            3,
            DecodeStats(
                *(1, 3, 2),
                num_prefill_tokens=1,
                accepted_histogram=(0, 0, 1),
                num_accepted_behind_stop=1,
            ),
        ),
        # accepted as the last drafted token: no bonus behind it
        (4, 3, DecodeStats(1, 3, 3, num_prefill_tokens=1, accepted_histogram=(0, 0, 0, 1))),
        # the bonus token
        (5, 3, DecodeStats(1, 3, 3, 0, 1, num_prefill_tokens=1, accepted_histogram=(0, 0, 0, 1))),
        # recovered
        (5, 4, DecodeStats(1, 4, 3, 1, num_prefill_tokens=1, accepted_histogram=(0, 0, 0, 1))),
    ],
)
def test_a_stop_token_ends_its_block_wherever_it_comes_from(
    stop: int, gamma: int, stats: DecodeStats
):
    target, draft = chain(CYCLE, eos_token_ids=(stop,)), chain(DRAFT_CYCLE)
    (generation,) = SpeculativeDecoder(target, draft, gamma=gamma, sampling=GREEDY).generate([[0]])
    assert generation.tokens == [*range(1, stop + 1)]
    assert generation.stop_reason == "eos"
    assert generation.stats == stats


def test_draft_acceptance_counts_what_is_drafted_behind_a_stop_token_as_vllm_does():
    """Draft 2 3 4 1 2, target 2 3 4 5: three of five accepted, of which the text keeps 2 and 3.

    vLLM's scheduler counts before it looks for stop tokens: accepted 3, drafted 5.
    """
    target, draft = chain(CYCLE, eos_token_ids=(3,)), chain(DRAFT_CYCLE)
    (generation,) = SpeculativeDecoder(target, draft, gamma=5, sampling=GREEDY).generate([[0]])
    assert generation.tokens == [1, 2, 3]
    assert generation.stats.num_drafted == 5
    assert generation.stats.draft_acceptance_rate == 3 / 5
    # of the text's own tokens, every examined one was accepted
    assert (generation.stats.num_accepted, generation.stats.acceptance_rate) == (2, 1.0)
    assert generation.stats.block_efficiency == 2


def test_the_stop_tokens_are_the_targets_unless_others_are_given():
    target, draft = chain(CYCLE, eos_token_ids=(4,)), chain(CYCLE, eos_token_ids=(2,))
    decoder = SpeculativeDecoder(target, draft, gamma=3)
    assert decoder.generate([[0]], 20)[0].tokens == [1, 2, 3, 4]
    assert decoder.generate([[0]], 20, eos_token_ids=[5, 3])[0].tokens == [1, 2, 3]
    endless = decoder.generate([[0]], 20, eos_token_ids=[])[0]
    assert (len(endless.tokens), endless.stop_reason) == (20, "length")


def test_a_stop_token_in_the_prompt_does_not_stop_anything():
    model = chain(CYCLE, eos_token_ids=(4,))
    (generation,) = SpeculativeDecoder(model, model).generate([[4, 4, 5]], 20)
    assert generation.tokens == [0, 1, 2, 3, 4]


# transformers#28508: max_new_tokens may fall inside a block.
@pytest.mark.parametrize("budget", range(1, 14))
@pytest.mark.parametrize("draft", [CYCLE, DRAFT_CYCLE])
def test_a_text_has_exactly_the_tokens_that_were_asked_for(budget: int, draft: list[int]):
    decoder = SpeculativeDecoder(chain(CYCLE), chain(draft), gamma=4, sampling=GREEDY)
    (generation,) = decoder.generate([[0]], budget)
    assert generation.tokens == [(1 + place) % 6 for place in range(budget)]
    assert generation.stop_reason == "length"
    stats = generation.stats
    assert stats.num_emitted == budget - 1
    # Nothing is drafted that could not be kept with a token behind it.
    assert stats.num_accepted <= stats.num_drafted <= budget


@pytest.mark.parametrize(
    ("prompt", "budget", "settings", "tokens", "reason"),
    [
        ([0], 5, {"eos_token_ids": (5,)}, [1, 2, 3, 4, 5], "eos"),  # on the last place
        ([0, 1], 8, {"max_length": 12}, [2, 3, 4, 5, 0, 1, 2, 3], "length"),
        ([4, 5, 0], 99, {"max_length": 12}, [1, 2, 3, 4, 5, 0, 1, 2, 3], "context"),
    ],
)
def test_what_ended_a_text_is_said(
    prompt: list[int], budget: int, settings: Any, tokens: list[int], reason: str
):
    model = chain(CYCLE, **settings)
    for decoder in (AutoregressiveDecoder(model), SpeculativeDecoder(model, model, gamma=2)):
        (generation,) = decoder.generate([prompt], budget)
        assert (generation.tokens, generation.stop_reason) == (tokens, reason)


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize(
    ("target_limit", "draft_limit"), [(20, None), (None, 20), (20, 30), (40, 20), (20, 20)]
)
def test_a_text_ends_with_the_targets_context_whatever_that_of_the_draft(
    gamma: int, target_limit: int | None, draft_limit: int | None
):
    """Sessions raise beyond their contexts. The third prompt leaves fewer than gamma places."""
    target = chain(CYCLE, max_length=target_limit)
    decoder = SpeculativeDecoder(target, chain(DRAFT_CYCLE, max_length=draft_limit), gamma=gamma)
    prompts = [[0] * length for length in (1, 6, 19, 32)[: 3 + (target_limit != 20)]]
    wanted = AutoregressiveDecoder(target).generate(prompts, 60)
    for prompt, found, plain in zip(prompts, decoder.generate(prompts, 60), wanted, strict=True):
        assert (found.tokens, found.stop_reason) == (plain.tokens, plain.stop_reason)
        assert decoder.remaining_context(prompt) == (target_limit and target_limit - len(prompt))
        drafts = len(found.tokens) > 2 and len(prompt) + gamma < (draft_limit or 99)
        assert bool(found.stats.num_drafted) == drafts


# 0 2 4 0 2 4 ... where the draft writes; behind its 8 tokens the target counts on.
@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (partial(TokenCascade, alpha=0.5, most_drafted=2), [2, 4, 5, 1, 3, 4, 5, 0, 1]),
        (partial(OracleCascade, rule=Chow(1.0)), [2, 4, 0, 2, 4, 0, 2, 3, 4]),
        (partial(SpeculativeDecoder, rule=Chow(1.0), gamma=2), [2, 4, 0, 2, 4, 0, 1, 2, 3]),
        # a response that the draft cannot finish is not kept
        (partial(SequenceCascade, alpha=1.0), [1, 2, 3, 4, 5, 0, 1, 2, 3]),
    ],
    ids=["token", "oracle", "chow", "sequence"],
)
def test_beyond_the_context_of_a_draft_that_writes_the_target_does(make: Any, tokens: list[int]):
    draft = chain([2, 3, 4, 5, 0, 1], max_length=8)
    prompts = [[0], [0] * 9]  # the second is not read by the draft
    found = make(target=chain(CYCLE), draft=draft).generate(prompts, 9)
    assert [each.tokens for each in found] == [tokens, [1, 2, 3, 4, 5, 0, 1, 2, 3]]
    kept = SequenceCascade(chain(CYCLE), draft, 1.0).generate([[0]], 8)[0].tokens
    assert kept == [2, 4, 0, 2, 4, 0, 2, 4]


SHORT = {
    name: {"n_positions" if name == "gpt2" else "max_position_embeddings": 24}
    for name in ("llama", "mistral", "opt", "bart", "gpt2")
}


@pytest.mark.parametrize(
    ("architecture", "prepare"),
    [
        *((name, lambda model: model) for name in SHORT),
        ("llama", prepare_for_decoding),
        ("llama", with_cuda_graphs),
    ],
)
def test_greedy_text_beyond_the_drafts_context_is_that_of_generate(
    architecture: str, prepare: Callable[[HfModel], HfModel]
):
    """To the end of the target's context of 64, with learned, rotary and sliding positions."""
    hf = tiny_hf(architecture)
    hf.generation_config.eos_token_id = None
    drafting = tiny_hf(architecture, seed=1, **SHORT[architecture])
    target, draft = prepare(wrap_model(hf)), prepare(wrap_model(drafting))
    decoder = SpeculativeDecoder(target, draft, gamma=6, sampling=GREEDY)
    prompts = [[3 + place % 40 for place in range(count)] for count in (16, 40, 61)]
    found = decoder.generate(prompts, 62, eos_token_ids=[])
    for prompt, generation in zip(prompts, found, strict=True):
        room = decoder.remaining_context(prompt)
        assert generation.tokens == generated(hf, prompt, min(62, room or 62))


@pytest.mark.parametrize("speculative", [True, False])
def test_what_cannot_be_decoded_is_refused_in_one_line(*, speculative: bool):
    model = chain(CYCLE, max_length=9)
    decoder = (
        SpeculativeDecoder(model, model, gamma=2) if speculative else AutoregressiveDecoder(model)
    )
    for error, said, call in [
        (PromptError, "got no prompt", lambda: decoder.generate([])),
        (PromptError, "prompt 1 is empty", lambda: decoder.generate([[1], []])),
        (PromptError, "token ids from -1 to 2", lambda: decoder.generate([[0], [2, -1]])),
        (PromptError, "goes from 0 to 5", lambda: decoder.generate([[6]])),
        (UsageError, "max_new_tokens must be 1 or more, got 0", lambda: decoder.generate([[1]], 0)),
        (UsageError, "batch_size must be 1", lambda: decoder.generate([[1]], batch_size=0)),
        (UsageError, "got 2 seeds for 1 prompts", lambda: decoder.generate([[1]], seed=[1, 2])),
        (
            ContextLengthError,
            "the prompt has 9 tokens and the context holds 9 tokens",
            lambda: decoder.generate([[1] * 9]),
        ),
        (PromptError, "the prompt is empty", lambda: decoder.stream([])),
        *(
            (PromptError, "token ids|input_ids", lambda wrong=wrong: decoder.generate(wrong))
            for wrong in ("text", ["text"], [1, 2], [[1.5]], [[[1]]], {"input_ids": []})
        ),
        # SGLang#24051: another vocabulary would decode garbage
        (
            VocabularyMismatchError,
            "6 tokens.*4",
            lambda: SpeculativeDecoder(model, chain([1, 2, 3, 0])),
        ),
        (
            UsageError,
            "^gamma must be 1 or more, got 0$",
            lambda: SpeculativeDecoder(model, model, gamma=0),
        ),
    ]:
        with pytest.raises(error, match=said) as caught:
            call()
        assert isinstance(caught.value, UsageError)
        assert caught.value.exit_code == 2


def test_token_ids_of_numpy_and_torch_are_integers_too():
    decoder = AutoregressiveDecoder(chain(CYCLE), GREEDY)
    (wanted,) = decoder.generate([[0, 1]], 3)
    for prompts in ([np.array([0, 1])], torch.tensor([[0, 1]]), [(np.int64(0), torch.tensor(1))]):
        found: Any = prompts
        assert decoder.generate(found, 3) == [wanted]


BAD = 58  # the only token behind which float16 overflows


def overflowing(architecture: str = "llama") -> HfModel:
    """Behind token BAD, a product in layer 2 is above 65,504."""
    hf: Any = tiny_hf(architecture)
    table = hf.get_input_embeddings().weight.data
    table[:, 0], table[BAD] = 0, 0
    table[BAD, 0] = 5
    for name, module in hf.named_modules():
        if name.endswith((".o_proj", ".down_proj", ".o", ".wo")):
            module.weight.data[0] = 0  # the first value of a hidden state tells BAD from others
        if ".2." in name and name.endswith((".gate_proj", ".up_proj", ".wi_0", ".wi_1")):
            module.weight.data[0, 0] = 8000
    return wrap_model(hf.half())


def refused() -> Any:
    return pytest.raises(ModelLoadError, match="are NaN or infinite in float16")


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
def test_logits_that_are_not_finite_are_one_line(sampling: SamplingParams):
    bad, good = overflowing(), wrap_model(tiny_hf().half())
    prompts = [[5, 6, 7], [8, BAD, 9]]
    with torch.inference_mode():
        fine = [bool(bad.hf(torch.tensor([each])).logits.isfinite().all()) for each in prompts]
    assert fine == [True, False], "by transformers"
    for decoder in (
        AutoregressiveDecoder(bad, sampling),
        SpeculativeDecoder(bad, good, None, 3, sampling),
        SpeculativeDecoder(good, bad, None, 3, sampling),
    ):
        with refused():
            decoder.generate(prompts, 8, eos_token_ids=[], batch_size=1)


def test_an_encoder_and_a_text_that_is_scored_may_overflow_too():
    model = overflowing("t5_v1_1")
    AutoregressiveDecoder(model).generate([[5, 6, 7]], 4)
    with refused():
        AutoregressiveDecoder(model).generate([[5, BAD, 7]], 4)
    model = overflowing()
    with refused():
        document_nats(model, [8, BAD, 9])
    with refused():
        forced_logits(model, [8], [BAD, 9], SamplingParams(), model.vocab_size)
