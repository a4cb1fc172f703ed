"""Which modules stage 3 gathers as one, and which parameters they own."""

import pytest
from torch import nn

from zero.layers import layers_of, named_layers, owned


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleDict({str(i): nn.MultiheadAttention(4, 2) for i in range(2)})
        self.tail = nn.Sequential(nn.LayerNorm(4), nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(nn.Linear(1, 1).bias.detach())


def names(params):
    return sorted(params)


def test_children_and_those_of_containers():
    assert [name for name, _ in layers_of(Model())] == [
        *("embed", "blocks.0", "blocks.1", "tail.0", "tail.1.0", "head"),
    ]


def test_a_module_without_children_is_its_own_layer():
    linear = nn.Linear(3, 2)
    assert list(layers_of(linear)) == [("", linear)]


def test_what_one_layer_has_is_cut_and_the_rest_stays_whole():
    model = Model()
    inside, rest = owned(model, dict(model.named_parameters()), named_layers(model, None), threshold=4)
    attention = ["in_proj_bias", "in_proj_weight", "out_proj.weight"]  # out_proj.bias has 4 elements
    assert [names(params) for params in inside] == [
        *([], [f"blocks.0.{name}" for name in attention], [f"blocks.1.{name}" for name in attention]),
        *([], ["tail.1.0.weight"], []),
    ]
    shared_own_and_small = ["embed.weight", "scale", "tail.0.bias", "tail.0.weight", "tail.1.0.bias"]
    assert names(rest) == sorted([*shared_own_and_small, "blocks.0.out_proj.bias", "blocks.1.out_proj.bias"])


def test_without_a_threshold_only_the_shared_and_the_models_own_are_whole():
    model = Model()
    _, rest = owned(model, dict(model.named_parameters()), named_layers(model, None), threshold=0)
    assert names(rest) == ["embed.weight", "scale"]


def test_layers_by_choice():
    model = Model()
    chosen = named_layers(model, [model.blocks, model.head])
    assert [name for name, _ in chosen] == ["blocks", "head"]
    inside, rest = owned(model, dict(model.named_parameters()), chosen, threshold=0)
    assert len(inside[0]) == 8
    assert not inside[1]  # its weight is read outside of the layers as well
    assert "tail.0.weight" in rest


def test_a_layer_in_a_layer_owns_nothing():
    """What two layers have can be freed with neither."""
    model = Model()
    chosen = named_layers(model, [model.blocks, model.blocks["1"]])
    inside, rest = owned(model, dict(model.named_parameters()), chosen, threshold=0)
    assert all(name.startswith("blocks.0") for name in inside[0])
    assert not inside[1]
    assert "blocks.1.out_proj.weight" in rest


def test_a_layer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="Linear is no part of the module"):
        named_layers(Model(), [nn.Linear(2, 2)])
