"""Bartlett's complexity from dense_matrices that are written out, and its margins."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.measures import spectral_bound
from natgrad.operators import Problem
from unit.measures.brute_force import DTYPE, batches, classified, network, refuses
from unit.measures.test_linear_maps import dense


def complexity(matrices, references=None):
    references = references or [torch.zeros_like(A) for A in matrices]
    norms = [float(torch.linalg.svdvals(A)[0]) for A in matrices]
    rows = [float((A - M).norm(dim=1).sum()) for A, M in zip(matrices, references, strict=True)]
    total = sum((r / s) ** (2 / 3) for r, s in zip(rows, norms, strict=True)) ** 1.5
    for s in norms:
        total *= s
    return total


class TestOfLinearLayers:
    def test_is_the_formula(self):
        x, y = classified(9, 4, 3)
        model = network(4, 5, 5, 3, activation=nn.ReLU)
        matrices = [layer.weight.detach() for layer in model[::2]]
        found = spectral_bound(model, F.cross_entropy, batches(x, y, 2, 7))
        assert found.complexity == pytest.approx(complexity(matrices), rel=1e-9)
        assert found.lipschitz * found.correction == pytest.approx(found.complexity, rel=1e-12)
        assert found.inputs == pytest.approx(float(x.norm()), rel=1e-12)
        assert found.samples == 9
        assert [one.name for one in found.layers] == ["0", "2", "4"]
        assert all(one.converged for one in found.layers)

    @pytest.mark.parametrize("as_dict", [False, True])
    def test_from_a_reference(self, as_dict):
        x, y = classified(9, 4, 3)
        model, initial = network(4, 5, 3), network(4, 5, 3)
        matrices, references = (
            [layer.weight.detach() for layer in m[::2]] for m in (model, initial)
        )
        reference = initial.state_dict() if as_dict else initial
        found = spectral_bound(model, F.cross_entropy, (x, y), reference=reference)
        assert found.complexity == pytest.approx(complexity(matrices, references), rel=1e-9)

    def test_bounds_the_change_of_outputs(self):
        x, y = classified(200, 4, 3)
        model = network(4, 5, 3, activation=nn.ReLU)
        found = spectral_bound(model, F.cross_entropy, (x, y))
        other = x + torch.randn_like(x)
        with torch.no_grad():
            change = (model(x) - model(other)).norm(dim=1)
        assert bool((change <= found.lipschitz * (x - other).norm(dim=1)).all())

    def test_a_layer_that_is_called_twice_counts_twice(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 3, dtype=DTYPE)

            def forward(self, x):
                return self.layer(F.relu(self.layer(x)))

        x, y = classified(5, 3, 3)
        model = Twice()
        found = spectral_bound(model, F.cross_entropy, (x, y))
        assert [one.name for one in found.layers] == ["layer", "layer (call 2)"]
        W = model.layer.weight.detach()
        assert found.complexity == pytest.approx(complexity([W, W]), rel=1e-9)

    def test_of_a_layer_with_weight_norm(self):
        x, y = classified(5, 3, 2)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, dtype=DTYPE))
        model = nn.Sequential(layer)
        found = spectral_bound(model, F.cross_entropy, (x, y))
        assert found.complexity == pytest.approx(complexity([layer.weight.detach()]), rel=1e-9)


def convolutional():
    model = nn.Sequential(
        nn.BatchNorm2d(1, dtype=DTYPE),
        nn.Conv2d(1, 3, 3, padding=1, dtype=DTYPE),
        nn.BatchNorm2d(3, dtype=DTYPE),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(3, 2, 2, dtype=DTYPE),
        nn.BatchNorm2d(2, affine=False, dtype=DTYPE),
        nn.Flatten(),
        nn.Linear(2 * 16, 3, dtype=DTYPE),
    )
    for norm in (model[0], model[2], model[6]):
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            with torch.no_grad():
                norm.weight.normal_()
    return model.eval()


def scale(norm):
    found = (norm.running_var + norm.eps).rsqrt()
    return found if norm.weight is None else found * norm.weight.detach()


def maps(model):
    first = scale(model[0]).expand(36).diag()
    return [
        first,
        dense(model[1], (1, 6, 6), scale(model[2])),
        dense(model[5], (3, 3, 3), scale(model[6])),
        model[8].weight.detach(),
    ]


class TestOfConvolutions:
    def test_with_the_norms_that_follow_them(self):
        x, y = torch.randn(7, 1, 6, 6, dtype=DTYPE), torch.randint(3, (7,))
        model = convolutional()
        found = spectral_bound(model, F.cross_entropy, (x, y))
        assert [one.name for one in found.layers] == ["0", "1", "5", "8"]
        assert found.complexity == pytest.approx(complexity(maps(model)), rel=1e-9)

    def test_from_a_reference_with_norms_of_its_own(self):
        x, y = torch.randn(7, 1, 6, 6, dtype=DTYPE), torch.randint(3, (7,))
        model, initial = convolutional(), convolutional()
        found = spectral_bound(model, F.cross_entropy, (x, y), reference=initial)
        truth = complexity(maps(model), maps(initial))
        assert found.complexity == pytest.approx(truth, rel=1e-9)

    def test_leaves_no_hooks(self):
        x, y = torch.randn(7, 1, 6, 6, dtype=DTYPE), torch.randint(3, (7,))
        model = convolutional()
        spectral_bound(model, F.cross_entropy, (x, y))
        assert not any(module._forward_hooks for module in model.modules())


class TestMargins:
    def test_normalise_the_bound(self):
        x, y = classified(50, 4, 3)
        model = network(4, 5, 3)
        with torch.no_grad():
            f = model(x)
        others = f.clone()
        others[range(50), y] = float("-inf")
        margins = f[range(50), y] - others.amax(1)
        gamma = float(margins.quantile(0.9))
        found = spectral_bound(model, F.cross_entropy, batches(x, y, 20, 30), quantile=0.9)
        assert found.margin == pytest.approx(gamma, rel=1e-10)
        truth = float(x.norm()) * found.complexity / (gamma * 50)
        assert found.normalised == pytest.approx(truth, rel=1e-10)

    def test_refusals(self):
        x, y = classified(50, 4, 3)
        model = network(4, 5, 3)
        found = spectral_bound(model, F.cross_entropy, (x, y))
        with refuses(
            "The spectral bound was measured without a margin: give quantile=0.1, for the margin "
            "that 90% of the samples have."
        ):
            _ = found.normalised
        with pytest.raises(ValueError, match=r"^The margin at the quantile 0.1 is -\d.*, as that"):
            spectral_bound(model, F.cross_entropy, (x, y), quantile=0.1)
        with refuses("quantile is 2 but must be in [0, 1]: pass such a number."):
            spectral_bound(model, F.cross_entropy, (x, y), quantile=2)
        with refuses(
            "SquareLoss has no classes, so there are no margins and no mistakes: use a "
            "cross-entropy, or give an error of your own where one is asked for."
        ):
            spectral_bound(model, F.mse_loss, (x, torch.randn(50, 3)), quantile=0.1)

    def test_of_several_processes(self, monkeypatch):
        x, y = classified(10, 4, 3)
        problem = Problem(network(4, 3), F.cross_entropy, (x, y))
        problem.value()
        monkeypatch.setattr(problem, "comm", type("Two", (), {"size": 2}))
        monkeypatch.setattr(problem, "totals", lambda numbers: numbers)
        with refuses(
            "A quantile of margins needs all of them in one process, but the data are spread over "
            "2: measure without a margin."
        ):
            spectral_bound(problem, quantile=0.9)


def test_prints_a_table():
    x, y = classified(50, 4, 3)
    found = spectral_bound(network(4, 5, 3), F.cross_entropy, (x, y), quantile=0.9)
    assert found.table().column("layer") == ("0", "2")
    assert f"= {found.complexity:.4g}" in found.table().footer
    assert f"with margin {found.margin:.4g}: {found.normalised:.4g}" in found.table().footer
    assert "Spectral complexity" in str(found)


class TestRefusals:
    def test_other_layers(self):
        x, y = classified(5, 4, 3)
        model = nn.Sequential(nn.LayerNorm(4, dtype=DTYPE), nn.Linear(4, 3, dtype=DTYPE))
        with refuses(
            "The spectral bound is of Linear layers, convolutions and BatchNorm, and LayerNorm '0' "
            "is none of them: measure a part of the model without it."
        ):
            spectral_bound(model, F.cross_entropy, (x, y))
        assert not model[1]._forward_hooks

    def test_no_layers(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.unused = nn.Linear(2, 2, dtype=DTYPE)

            def forward(self, x):
                return x + 0

        x, y = classified(5, 3, 3)
        with refuses(
            "The model called no Linear layer and no convolution, so there is no spectral bound: "
            "give a model with layers."
        ):
            spectral_bound(Own(), F.cross_entropy, (x, y))

    def test_references(self):
        x, y = classified(5, 4, 3)
        model = network(4, 3)
        with refuses(
            "The reference has no '0.weight', which the model has: give a model of the same kind "
            "or its state_dict(), or None for zeros."
        ):
            spectral_bound(model, F.cross_entropy, (x, y), reference={})
        with refuses(
            "The reference is an object of type int but must be a model, a dict of tensors by "
            "name, or None for zeros: give one of them."
        ):
            spectral_bound(model, F.cross_entropy, (x, y), reference=0)

    def test_norms_without_statistics(self):
        x, y = classified(5, 3, 3)
        norm = nn.BatchNorm1d(3, track_running_stats=False, dtype=DTYPE)
        model = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), norm).eval()
        with refuses(
            "BatchNorm1d '1' has no running statistics, so that it always mixes the samples of a "
            "batch: give it track_running_stats=True, or take a norm layer of single samples."
        ):
            spectral_bound(model, F.cross_entropy, (x, y))

    def test_tokens(self):
        model = nn.Sequential(nn.Linear(4, 3))
        with refuses(
            "The inputs are of type dict, but the measure is of networks that take one "
            "floating-point tensor: measure the part of the model behind its embedding."
        ):
            data = {"input": torch.randn(5, 4), "labels": torch.zeros(5, dtype=torch.int64)}
            spectral_bound(model, F.cross_entropy, data)


def test_a_copy_is_as_complex():
    x, y = classified(5, 4, 3)
    model = network(4, 3)
    again = copy.deepcopy(model)
    found = spectral_bound(model, F.cross_entropy, (x, y), reference=again)
    assert found.complexity == 0
