"""Gauss-Newton blocks of residuals that differentiate the network, against dense ones by torch.func
in float64: the gradient of every point's residual, written out."""

import copy
from math import pi

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from natgrad import EKFAC, KFAC, Diagonal, Full, SumLoss, UnitWise
from natgrad.curvature import GaussNewton
from natgrad.errors import CaptureError, SettingError


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Twice(nn.Module):
    """A layer that is called twice, and one that is frozen."""

    def __init__(self, d):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(d, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.first.requires_grad_(False)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(self.inner(self.inner(h).tanh()).sin() + h)


def network(d=2, activation=nn.Tanh, bias=True):
    torch.manual_seed(d)
    layers = [nn.Linear(d, 5, bias=bias), activation(), nn.Linear(5, 4), activation()]
    return nn.Sequential(*layers, nn.Linear(4, 1)).double()


def same(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def points(n, d, seed=0):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laplacian(u, x):
    """As plain code of PINNs has it; ``u`` and its gradient along the way."""
    (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    total = 0.0
    for i in range(x.shape[1]):
        part = du[:, i]
        (second,) = torch.autograd.grad(part, x, torch.ones_like(part), create_graph=True)
        total = total + second[:, i]
    return total


def interior(model, x):
    """The residual of ``-Δu + u du/dx_0 = f``."""
    x = x.clone().requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    return -laplacian(u, x) + u[:, 0] * du[:, 0] - (pi * x).sin().prod(1)


def interior_of_point(f, x):
    source = (pi * x).sin().prod()
    return -jacrev(grad(f))(x).diagonal().sum() + f(x) * grad(f)(x)[0] - source


def value_of_point(f, x):
    return f(x)


def jacobian(model, of_point, x):
    """``[n, parameters]`` of one residual a point, by names of parameters."""
    twin = copy.deepcopy(model)
    own = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}

    def residual(parameters, point):
        return of_point(lambda z: functional_call(twin, parameters, (z,)).sum(), point)

    return vmap(grad(residual), (None, 0))(own, x)


def of_layer(rows, name):
    """``[n, rows, cols]`` of one layer, with its bias as the last column."""
    weight = rows[f"{name}.weight"]
    if f"{name}.bias" not in rows:
        return weight
    return torch.cat([weight, rows[f"{name}.bias"].unsqueeze(2)], 2)


def expected(name, *terms):
    """``[n, rows, cols]`` with ``sum_n vec vec^T`` the block; ``terms``: weight and Jacobian."""
    return torch.cat(
        [(2 * w / len(rows)) ** 0.5 * rows for w, j in terms for rows in [of_layer(j, name)]]
    )


def square(rows):
    flat = rows.flatten(1)
    return flat.mT @ flat


def preconditioner(model, structure=None, **given):
    often = {"update_every": 1, "refresh_every": 1, "kl_clip": None}
    return KFAC(model, curvature=GaussNewton(), structure=structure, **{**often, **given})


def blocks(kfac):
    return {b.name: b.structure.dense(b.kept(), b.forms, b.shape) for b in kfac.blocks}


def poisson(kfac, model, inside, border, weights=(1.0, 3.0)):
    loss = kfac.residuals(interior(model, inside), model(border)[:, 0], weights=weights)
    loss.backward()
    return loss


NETWORKS = {
    "1": lambda: (network(1), 1),
    "2, sine": lambda: (network(2, Sine), 2),
    "3, GELU, no bias": lambda: (network(3, nn.GELU, bias=False), 3),
    "called twice, frozen": lambda: (Twice(2).double(), 2),
}


class TestBlocks:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_full_blocks_are_exact(self, name):
        """Interior and border, with points and weights of their own."""
        model, d = NETWORKS[name]()
        inside, border = points(7, d), points(4, d, seed=1)
        kfac = preconditioner(model, Full())
        terms = [
            (1.0, jacobian(model, interior_of_point, inside)),
            (3.0, jacobian(model, value_of_point, border)),
        ]
        loss = poisson(kfac, model, inside, border)
        r = interior(copy.deepcopy(model), inside)
        same(loss, r.square().mean() + 3 * model(border).square().mean())
        kfac.step()
        for block, found in blocks(kfac).items():
            same(found, square(expected(block, *terms)), 1e-10)

    def test_the_default_has_the_partial_traces_of_the_block(self):
        model = network(2)
        inside, border = points(7, 2), points(4, 2, seed=1)
        kfac = preconditioner(model)
        terms = [
            (1.0, jacobian(model, interior_of_point, inside)),
            (3.0, jacobian(model, value_of_point, border)),
        ]
        poisson(kfac, model, inside, border)
        kfac.step()
        for name, found in blocks(kfac).items():
            rows = expected(name, *terms)
            a, g = torch.einsum("nrc,nrd->cd", rows, rows), torch.einsum("nrc,nsc->rs", rows, rows)
            same(found, torch.kron(g, a) / a.trace(), 1e-10)
            same(found.trace(), square(rows).trace(), 1e-10)

    @pytest.mark.parametrize(
        "structure", [UnitWise(), Diagonal(), EKFAC(sharing="traces")], ids=repr
    )
    def test_other_structures_keep_their_part(self, structure):
        model, inside = network(1), points(6, 1)
        kfac = preconditioner(model, structure, factor_decay=0.0)
        rows = jacobian(model, interior_of_point, inside)
        for _ in range(2):  # EKFAC looks along the basis of the last refresh
            kfac.residuals(interior(model, inside)).backward()
            kfac.step()
        for block in kfac.blocks:
            own = expected(block.name, (1.0, rows))
            full = square(own)
            if isinstance(structure, UnitWise):
                pieces = full.view(own.shape[1], own.shape[2], *own.shape[1:])
                full = torch.block_diag(*(pieces[i, :, i] for i in range(own.shape[1])))
            elif isinstance(structure, Diagonal):
                full = full.diagonal().diag()
            else:
                a = torch.einsum("nrc,nrd->cd", own, own)
                g = torch.einsum("nrc,nsc->rs", own, own)
                q = torch.kron(torch.linalg.eigh(g)[1], torch.linalg.eigh(a)[1])
                kept = {n: running.mean for n, running in block.running.items()}
                known = block.parts["S"][0].flatten()
                same(known.sort()[0], (q.mT @ full @ q).diagonal().sort()[0], 1e-8)
                assert set(kept) == {"A", "G", "S"}
                continue
            same(block.structure.dense(block.kept(), block.forms, block.shape), full, 1e-10)

    def test_third_derivatives(self):
        """Korteweg-de Vries, ``u u_x + u_xxx``: hooks follow gradients to any order."""
        model, x = network(1), points(6, 1)

        def of_point(f, z):
            third = lambda s: jacrev(grad(f))(s.unsqueeze(0))[0, 0]  # noqa: E731
            return f(z) * grad(f)(z)[0] + grad(third)(z[0])

        kfac, rows = preconditioner(model, Full()), jacobian(model, of_point, x)
        x.requires_grad_()
        u = model(x)
        derivatives = [u]
        for _ in range(3):
            last = derivatives[-1]
            derivatives += torch.autograd.grad(last, x, torch.ones_like(last), create_graph=True)
        kfac.residuals(u * derivatives[1] + derivatives[3]).backward()
        kfac.step()
        for name, found in blocks(kfac).items():
            same(found, square(expected(name, (1.0, rows))), 1e-9)


class TestTerms:
    def test_two_passes_meet_in_one_residual(self):
        """A periodic border, ``u(0, y) - u(1, y)``, squared as a whole."""
        model = network(2)
        left, right = points(5, 2), points(5, 2)
        left[:, 0], right[:, 0] = 0.0, 1.0
        a, b = (jacobian(model, value_of_point, x) for x in (left, right))
        kfac = preconditioner(model, Full())
        kfac.residuals((model(left) - model(right))[:, 0]).backward()
        kfac.step()
        rows = {name: a[name] - b[name] for name in a}
        for name, found in blocks(kfac).items():
            same(found, square(expected(name, (1.0, rows))), 1e-10)

    def test_several_residuals_of_one_pass(self):
        """A vector of two entries a point, and a further term of some of the same points."""
        model, x = network(2), points(6, 2)
        kfac = preconditioner(model, Full())
        inner, value = (jacobian(model, f, x) for f in (interior_of_point, value_of_point))
        some = {name: rows[2:5] for name, rows in value.items()}
        z = x.clone().requires_grad_()
        u = model(z)
        first = (
            -laplacian(u, z)
            + u[:, 0] * torch.autograd.grad(u, z, torch.ones_like(u), create_graph=True)[0][:, 0]
        )
        kfac.residuals(torch.stack([first, 2 * u[:, 0]], 1), u[2:5]).backward()
        kfac.step()
        for name, found in blocks(kfac).items():
            same(found, square(expected(name, (0.5, inner), (2.0, value), (1.0, some))), 1e-10)

    def test_micro_batches_are_a_mean(self):
        """Losses divided by their number, as usual; weights of a sum scale the blocks."""
        results = []
        for parts in (1, 2):
            model = network(2)
            kfac = preconditioner(model, Full())
            for x in points(8, 2).chunk(parts):
                (kfac.residuals(interior(model, x), weights=[8.0]) / parts).backward()
            kfac.step()
            results.append((blocks(kfac), [p.grad for p in model.parameters()]))
        same(*results)
        rows = jacobian(network(2), interior_of_point, points(8, 2))
        for name, found in results[0][0].items():
            same(found, square(expected(name, (8.0, rows))), 1e-10)

    def test_a_factor_in_front_of_the_loss_is_one_of_the_curvature(self):
        found = []
        for weight, factor in ((1.0, 8.0), (8.0, 1.0)):
            model = network(2)
            kfac = preconditioner(model, Full())
            r = interior(model, points(8, 2))
            (factor * kfac.residuals(r, weights=[weight])).backward()
            kfac.step()
            found.append((blocks(kfac), [p.grad for p in model.parameters()]))
        same(*found)

    def test_micro_batches_of_several_weights_are_told_of(self):
        model = network(2)
        kfac = preconditioner(model, Full())
        for x in points(8, 2).split((2, 6)):
            (kfac.residuals(interior(model, x)) * len(x) / 8).backward()
        with pytest.warns(UserWarning, match=r"weights from 0\.25 to 0\.75 in the loss"):
            kfac.step()

    def test_a_deep_linear_network_is_solved_in_one_step(self):
        """One layer: the block is all of the matrix, so that a step without damping ends at the
        least squares solution of ``2 u + du/dx = x``."""
        torch.manual_seed(0)
        model, x = nn.Linear(1, 1).double(), points(9, 1).requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kfac = preconditioner(model, Full(), damping=1e-14)
        for _ in range(1):
            u = model(x)
            (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
            kfac.residuals(2 * u + du - x).backward()
            kfac.step()
            optimizer.step()
        same(model.weight.flatten(), torch.tensor([0.5]).double(), 1e-8)
        same(model.bias, torch.tensor([-0.25]).double(), 1e-8)

    def test_steps_without_an_update_and_without_gradients_cost_nothing(self):
        model, x = network(2), points(4, 2)
        kfac = preconditioner(model, update_every=2)
        for step in range(3):
            model.zero_grad()
            loss = kfac.residuals(interior(model, x))
            assert bool(kfac.capture.passes) == (step != 1)
            loss.backward()
            kfac.step()
        assert not kfac.capture.taped
        with torch.no_grad():
            same(kfac.residuals(model(x)), model(x).square().mean())
        assert not kfac.capture.passes


def says(kind, sentence, call, *args, **kwargs):
    with pytest.raises(kind) as raised:
        call(*args, **kwargs)
    assert str(raised.value) == sentence


class TestErrors:
    def test_what_residuals_are(self):
        kfac = preconditioner(network(2))
        needs = (
            "but needs floating-point tensors [points, ...] that are not empty: pass what is "
            "squared, before its mean is taken."
        )
        says(
            SettingError,
            f"residuals() got a tensor of shape [] {needs}",
            kfac.residuals,
            torch.tensor(1.0),
        )
        says(SettingError, f"residuals() got 'r' {needs}", kfac.residuals, "r")
        says(
            SettingError,
            "residuals() got no residual: pass one tensor for each term of the loss.",
            kfac.residuals,
        )
        says(
            SettingError,
            "residuals() got 2 weights for 1 residuals: pass one for each.",
            kfac.residuals,
            torch.ones(3),
            weights=[1, 2],
        )
        with pytest.raises(SettingError, match=r"residuals\(weights=\.\.\.\).*-1"):
            kfac.residuals(torch.ones(3), weights=[-1])

    def test_other_curvatures(self):
        kfac = KFAC(network(2), kl_clip=None)
        says(
            SettingError,
            "residuals() needs curvature=natgrad.curvature.GaussNewton(), but this KFAC has "
            "EmpiricalFisher(): pass it to KFAC, or leave the call out.",
            kfac.residuals,
            torch.ones(3),
        )
        kfac = preconditioner(network(2))
        says(
            SettingError,
            "observe() shows outputs, but GaussNewton() looks at residuals: call "
            "kfac.residuals(...).",
            kfac.observe,
            torch.ones(3),
        )
        with pytest.raises(SettingError, match=r"says what residuals\(\) says.*leave loss out"):
            preconditioner(network(2), loss=SumLoss())
        with pytest.raises(SettingError, match=r"statistics= takes some samples.*leave it out"):
            preconditioner(network(2), statistics=0.5)
        with pytest.raises(
            SettingError, match="sharing is 'reduce' but must be 'expand' or 'traces'"
        ):
            EKFAC(sharing="reduce")

    def test_residuals_that_were_not_given(self):
        model = network(2)
        kfac = preconditioner(model)
        model(points(3, 2)).mean().backward()
        says(
            CaptureError,
            "There are gradients at step 0 but no statistics, as GaussNewton() saw no residuals: "
            "call kfac.residuals(...) before backward().",
            kfac.step,
        )

    def test_residuals_of_something_else(self):
        model = network(2)
        kfac = preconditioner(model)
        model(points(3, 2))
        with pytest.raises(CaptureError, match="not of the model's forward passes since"):
            kfac.residuals(network(2)(points(3, 2)))

    def test_points_that_share_samples(self):
        model = network(2)
        kfac = preconditioner(model)
        u = model(points(6, 2))[:, 0]
        kfac.residuals(u[:4])  # some of the points, each by itself
        for r in (torch.cat([u, 2 * u]), u[:3] - u[3:]):
            with pytest.raises(
                CaptureError, match=r"A residual of \d+ points depends on 6 samples"
            ):
                kfac.residuals(r)
        v = model(points(3, 2))[:, 0]
        with pytest.raises(CaptureError, match="forward passes with 3 and 6 samples"):
            kfac.residuals(u[:3] - v)
