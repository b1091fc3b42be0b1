import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.sources import sample_completions
from support.fakes import TableModel
from support.models import tiny_model

EOS = 1


def cycle(vocab_size: int, **options: object) -> TableModel:
    """Token t is always followed by t + 1."""
    table = torch.eye(vocab_size, dtype=torch.float64).roll(1, dims=1)
    return TableModel(table, **options)  # type: ignore[arg-type]


def test_a_certain_model_writes_the_only_text_it_can():
    written = sample_completions(cycle(7), [[2], [5, 6]], [0, 1], 4)
    assert written == [[3, 4, 5, 6], [0, 1, 2, 3]]


def test_the_end_token_is_kept_and_ends_its_row_only():
    model = cycle(7, eos_token_ids=(EOS,))
    assert sample_completions(model, [[6], [2], [0]], [0, 1, 2], 4) == [
        [0, EOS],
        [3, 4, 5, 6],
        [EOS],
    ]


def test_rows_that_ended_cost_no_more_passes():
    model = cycle(7, eos_token_ids=(EOS,))
    sample_completions(model, [[0], [6]], [0, 1], 50)
    assert model.num_passes == 2  # the prompts, and one token of the second row


def test_no_pass_is_made_for_a_token_that_nobody_reads():
    model = cycle(7)
    sample_completions(model, [[0]], [0], 3)
    assert model.num_passes == 3


def test_a_row_is_the_same_alone_and_in_company():
    model = tiny_model()
    prompts = [[5, 6, 7], [9], [4, 4, 4, 4, 4]]
    ends = list(range(10))
    together = sample_completions(model, prompts, [0, 1, 2], 8, eos_token_ids=ends)
    for row, prompt in enumerate(prompts):
        alone = sample_completions(model, [prompt], [row], 8, eos_token_ids=ends)
        assert alone == [together[row]]


def test_greedy_text_is_that_of_transformers():
    model = tiny_model()
    prompt = [5, 6, 7]
    theirs = model.hf.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    ours = sample_completions(
        model, [prompt], [0], 12, sampling=SamplingParams(temperature=0), eos_token_ids=()
    )
    assert ours == [theirs[0, 3:].tolist()]


@pytest.mark.parametrize("prompt", [[0], [0, 3]])
def test_a_huge_repetition_penalty_allows_no_token_twice(prompt: list[int]):
    model = TableModel.random(5, seed=3)
    sampling = SamplingParams(temperature=0, repetition_penalty=1e6)
    written = sample_completions(model, [prompt], [0], 5 - len(prompt), sampling=sampling)
    assert sorted(prompt + written[0]) == [0, 1, 2, 3, 4]
