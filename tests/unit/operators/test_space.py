"""Parameters as one flat vector."""

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.operators.space import ParameterSpace, chosen
from unit.operators.small_problems import says


def model():
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))


def space():
    return ParameterSpace(dict(model().named_parameters()))


def test_order_and_slices():
    own = space()
    assert own.names == ("0.weight", "0.bias", "2.weight")
    assert own.slices == {
        "0.weight": slice(0, 6),
        "0.bias": slice(6, 8),
        "2.weight": slice(8, 12),
    }
    assert own.size == 12


def test_there_and_back():
    net, own = model(), space()
    named = {name: p.detach() for name, p in net.named_parameters()}
    flat = own.flat(dict(reversed(named.items())))  # in any order
    assert torch.equal(flat, nn.utils.parameters_to_vector(net.parameters()))
    back = own.named(flat)
    assert list(back) == list(named)
    assert all(torch.equal(back[name], named[name]) for name in named)
    assert back["0.weight"].data_ptr() == flat.data_ptr()
    first, *_ = own.split(torch.stack([flat, 2 * flat]))
    assert torch.equal(first, torch.stack([named["0.weight"], 2 * named["0.weight"]]))


def test_chosen_parameters():
    net = model()
    net[0].bias.requires_grad_(False)
    assert list(chosen(net, None)) == ["0.weight", "2.weight"]
    assert list(chosen(net, "2.*")) == ["2.weight"]
    assert list(chosen(net, ["2.*", "0.*"])) == ["0.weight", "2.weight"]  # in the model's order
    assert list(chosen(net, ("*.weight",))) == ["0.weight", "2.weight"]


def test_a_tied_parameter_is_one():
    net = model()
    net.append(nn.Linear(2, 2, bias=False))
    net[3].weight = net[2].weight
    assert list(chosen(net, None)) == ["0.weight", "0.bias", "2.weight"]


class TestMessages:
    def test_missing(self):
        named = space().named(torch.zeros(12))
        del named["0.bias"]
        says(
            SettingError,
            "A vector of 3 parameters was given as a dict that lacks '0.bias': give a tensor for "
            "each of operator.space.names.",
            space().flat,
            named,
        )

    def test_another(self):
        says(
            SettingError,
            "A vector of 3 parameters was given as a dict that has 'more', which is no such one: "
            "give a tensor for each of operator.space.names.",
            space().flat,
            {**space().named(torch.zeros(12)), "more": torch.zeros(1)},
        )

    def test_shape(self):
        says(
            SettingError,
            "The vector's part '0.bias' has shape [1, 2] but the parameter has [2]: give a tensor "
            "of that shape.",
            space().flat,
            {**space().named(torch.zeros(12)), "0.bias": torch.zeros(1, 2)},
        )

    def test_nothing_to_train(self):
        says(
            SettingError,
            "Sequential has no parameter with requires_grad=True, so there is no matrix: turn it "
            "on for those that are wanted.",
            chosen,
            model().requires_grad_(False),
            None,
        )

    @pytest.mark.parametrize("patterns", ["1.*", ["*.weight", "1.*"]])
    def test_a_pattern_without_a_match(self, patterns):
        says(
            SettingError,
            "parameters has '1.*', which matches none of the trainable parameters of Sequential: "
            "use patterns of names such as '0.weight'.",
            chosen,
            model(),
            patterns,
        )
