import pytest
import torch

from paceline.errors import UsageError
from paceline.models import CausalModel, wrap_model
from paceline.models.drafts.layers import subset_layers
from paceline.train.initial_draft import KeptLayers, climb, search_layers
from support.models import tiny_hf, tiny_model

TEXTS = [[5, 9, 3, 7, 11, 20], [30, 4, 8, 1, 2], [9, 9, 12, 7, 3, 25, 6]]


def target_of(working: list[int]) -> CausalModel:
    """Only these layers do anything: the others hand on what they are given."""
    hf = tiny_hf("llama", num_hidden_layers=6)
    with torch.no_grad():
        for index, layer in enumerate(hf.base_model.layers):
            if index not in working:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return wrap_model(hf)


@pytest.mark.parametrize("working", [[1, 4], [0, 2, 3], [5]])
def test_the_layers_that_work_are_found(working: list[int]):
    found = search_layers(target_of(working), TEXTS, len(working))
    assert found == KeptLayers(working)


def test_one_layer_fewer_gives_up_the_least_of_them():
    target = target_of([1, 3, 4])
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target.hf.base_model.layers[3].get_submodule(name).weight *= 1e-3
    assert search_layers(target, TEXTS, 2) == KeptLayers([1, 4])


def test_climbing_moves_layers_until_nothing_is_better():
    def acceptance(chosen: tuple[int, ...]) -> float:
        return -sum((a - b) ** 2 for a, b in zip(chosen, (2, 5, 9), strict=True))

    assert climb((0, 1, 2), 10, acceptance) == (2, 5, 9)
    assert climb((7, 8, 9), 10, acceptance) == (2, 5, 9)


def test_layers_that_are_shared_are_looked_at_and_not_copied():
    target = tiny_model("llama")
    draft = subset_layers(target, [0, 2], share=True)
    mine = {id(weight) for weight in target.hf.parameters()}
    assert {id(weight) for weight in draft.hf.parameters()} < mine
    assert not {id(w) for w in subset_layers(target, [0, 2]).hf.parameters()} & mine
    assert target.hf.config.num_hidden_layers == 4


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(UsageError, match="got 5 layers to search for; wanted 1 to 4, the target's"):
        search_layers(tiny_model("llama"), TEXTS, 5)
    with pytest.raises(UsageError, match="got no text to rank layers with"):
        search_layers(tiny_model("llama"), [[]], 2)
