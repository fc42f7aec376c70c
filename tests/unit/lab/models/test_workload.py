"""Counts by hand of small models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC
from natgrad.errors import SettingError
from natgrad.lab.models.workload import passes
from natgrad.lab.names import NETWORKS


def on_meta(build):
    with torch.device("meta"):
        return build()


def workload(model, sample, **settings):
    found = passes(model, sample)
    kfac = KFAC(model, kl_clip=None)
    return found.workload(kfac.blocks, kfac.plan.blocks, **settings)


def test_two_linear_layers():
    model = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))
    found = workload(model, (5,), batch=4, optimizer_bytes=8)
    assert found.parameters == 5 * 7 + 7 + 7 * 3 + 3
    assert found.forward == 2 * (5 * 7 + 7 * 3)
    assert found.backward == 2 * (5 * 7 + 2 * 7 * 3)  # none for the input of the first
    assert found.statistics == 2 * (6**2 + 7**2 + 8**2 + 3**2)
    assert found.activations == 4 * (5 + 7)  # inputs; ReLU's output is the second one's
    assert (found.batch, found.optimizer_bytes, found.parameter_bytes) == (4, 8, 4)


def test_gradients_come_from_the_last_layer_on():
    model = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))
    arrivals = workload(model, (5,)).arrivals
    assert [one.block for one in arrivals] == ["2", "2", "0", "0"]
    assert sum(one.numel for one in arrivals) == 66
    assert [one.share for one in arrivals] == sorted(one.share for one in arrivals)
    assert arrivals[-1].share == 1.0
    assert max(one.share for one in arrivals if one.block == "2") < 1.0


def test_positions_of_a_convolution():
    model = on_meta(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(48, 2))
    )
    found = workload(model, (2, 6, 6))  # 4 x 4 outputs
    assert found.statistics == 2 * (16 * (18**2 + 3**2) + 49**2 + 2**2)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_keeps_no_scores():
    found = workload(on_meta(Attends), (6, 8))
    product = 2 * 2 * 6 * 6 * 4  # heads, positions twice, width of a head
    assert found.forward == 3 * 2 * 6 * 8 * 8 + 2 * product
    assert found.backward == 3 * 2 * 6 * 8 * 8 + 5 * product  # no gradient of the input
    assert found.activations == 4 * 6 * 8 * (1 + 3 + 1)  # input; q, k and v; output


def test_one_input_is_counted_once():
    found = workload(on_meta(Attends), (6, 8))
    assert found.statistics == 2 * 6 * (8**2 + 3 * 8**2)


def test_resnet50():
    """4.09e9 multiply-adds, with strides in the 3 x 3 convolutions."""
    network = NETWORKS["resnet50"]
    found = workload(network.without_weights(), network.sample)
    assert found.parameters == 25_557_032
    assert found.forward == pytest.approx(2 * 4.09e9, rel=0.01)
    assert 1.9 < found.backward / found.forward < 2.0
    assert all(one.block for one in found.arrivals)  # the bias of norm layers has one, too


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x[x > 0].reshape(-1, 4))


def test_shapes_that_depend_on_data():
    with pytest.raises(
        SettingError, match=r"A step of Chooses on a sample \[4\] cannot be counted"
    ):
        passes(on_meta(Chooses), (4,))


def test_another_shape():
    with pytest.raises(SettingError, match="pass the shape of one input, or, if shapes depend on"):
        passes(on_meta(lambda: nn.Linear(4, 4)), (5,))


def test_a_model_with_numbers():
    with pytest.raises(SettingError, match=r"A step of Linear is counted on the meta device but"):
        passes(nn.Linear(4, 4), (4,))


def test_nothing_is_left_on_the_model():
    model = on_meta(lambda: nn.Linear(4, 4)).eval()
    passes(model, (4,))
    assert not model.training
    assert not model._forward_hooks
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
