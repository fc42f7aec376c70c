"""Losses with gradients in them: counted exactly where they can be, and refused where not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import KFAC, Full, Kronecker, NaturalMuon
from natgrad.errors import CaptureError

OFTEN = {"update_every": 1, "refresh_every": 1}


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def penalty(model, x):
    """``(|du/dx| - 1)^2`` of each sample, as of a Wasserstein critic."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1) ** 2


def preconditioner(model, **given):
    return KFAC(model, kl_clip=None, **{**OFTEN, **given})


def factors(kfac):
    return {b.name: {n: r.mean for n, r in b.running.items()} for b in kfac.blocks}


class Checkpointed(nn.Module):
    on = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.on else self.inner(x)


class TestRight:
    """The empirical Fisher of a loss with gradients in it, from ``loss.backward()`` alone."""

    @pytest.mark.parametrize("whole", [False, True], ids=["full", "traces"])
    @pytest.mark.parametrize(
        "net", ["critic", "last layer alone", "tokens", "tokens, no bias", "checkpointed"]
    )
    def test_a_gradient_penalty(self, whole, net, monkeypatch):
        model, x = critic(), data(6, 3)
        if net == "last layer alone":
            model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        elif net.startswith("tokens"):
            x = data(6, 2, 3)
            if net.endswith("bias"):
                model[0], model[2] = nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False)
                model.double()
        elif net == "checkpointed":
            model = nn.Sequential(model[0], Checkpointed(nn.Sequential(nn.Tanh(), model[2])))
        own = {name: p.detach().clone() for name, p in model.named_parameters()}

        def loss(parameters, sample):
            u = lambda z: functional_call(model, parameters, (z,)).sum()  # noqa: E731
            return (grad(u)(sample).flatten().norm() - 1) ** 2 + u(sample) ** 2

        with monkeypatch.context() as patch:
            patch.setattr(Checkpointed, "on", False)
            rows = vmap(grad(loss), (None, 0))(own, x)
        kfac = preconditioner(model, structure=Kronecker(sharing="traces") if whole else Full())
        z = x.clone().requires_grad_()
        u = model(z)
        (slope,) = torch.autograd.grad(u.sum(), z, create_graph=True)
        each = (slope.flatten(1).norm(dim=1) - 1) ** 2 + u.flatten(1).sum(1) ** 2
        each.mean().backward()
        kfac.step()
        for block in kfac.blocks:
            dw = rows[f"{block.name}.weight"]
            if f"{block.name}.bias" in rows:
                dw = torch.cat([dw, rows[f"{block.name}.bias"].unsqueeze(2)], 2)
            flat = dw.flatten(1)
            right = flat.mT @ flat / len(x)
            if whole:
                a, g = torch.einsum("nrc,nrd->cd", dw, dw), torch.einsum("nrc,nsc->rs", dw, dw)
                right = torch.kron(g, a) / a.trace() / len(x)
            same(block.structure.dense(block.kept(), block.forms, block.shape), right)


class TestRefused:
    def says(self, sentence, kfac, loss):
        loss.backward()
        with pytest.raises(CaptureError) as raised:
            kfac.step()
        assert str(raised.value) == sentence

    UNWATCHED = (
        "or compute that part of the loss inside of 'with kfac.unwatched():', which leaves it out "
        "of the curvature."
    )

    @pytest.mark.parametrize("net", ["critic", "last layer alone"])
    def test_a_structure_without_a_place_for_them(self, net):
        model = critic() if net == "critic" else nn.Sequential(nn.Linear(3, 1)).double()
        self.says(
            "The loss depends on gradients that go through Linear '0' (create_graph=True), for "
            "which Kronecker(sharing='expand') has no place: pass "
            "structure=natgrad.Kronecker(sharing='traces'); or, if the loss is one of squared "
            "residuals, curvature=natgrad.curvature.GaussNewton(), and take the loss from "
            "kfac.residuals(...); " + self.UNWATCHED,
            preconditioner(model),
            penalty(model, data(4, 3)).mean(),
        )

    def test_a_layer_that_is_not_linear(self):
        model = images()
        self.says(
            "The loss depends on gradients that go through Conv2d '0' (create_graph=True), and "
            "KFAC can count those of nn.Linear with a plain weight alone (not sharded): leave the "
            "layer out with exclude=['0'], " + self.UNWATCHED,
            preconditioner(model, structure=Kronecker(sharing="traces")),
            penalty(model, data(4, 1, 4, 4)).mean(),
        )
        model = images()
        kfac = preconditioner(model, structure=Kronecker(sharing="traces"), exclude=["0"])
        penalty(model, data(4, 1, 4, 4)).mean().backward()
        kfac.step()

    def test_second_derivatives_through_one(self):
        """The first ones are not part of the loss."""
        model, x = images(), data(4, 1, 4, 4).requires_grad_()
        kfac = preconditioner(model)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        second.square().mean().backward()
        with pytest.raises(CaptureError, match=r"gradients that go through (Conv2d|Linear)"):
            kfac.step()

    @pytest.mark.parametrize("structure", [None, Kronecker(sharing="traces")], ids=str)
    def test_gradients_of_parameters(self, structure):
        """A penalty on the norm of the gradient."""
        model, x = critic(), data(4, 3)
        kfac = preconditioner(model, structure=structure)
        loss = model(x).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        self.says(
            "The loss depends on gradients of the parameters of Linear '2' (create_graph=True, as "
            "in MAML or a penalty on their norm), which are sums over samples, so that no sample "
            "has a gradient of its own: take a gradient of first order there, " + self.UNWATCHED,
            kfac,
            loss + sum(g.square().sum() for g in slopes),
        )

    def test_adapted_weights(self):
        """MAML, on purpose left out: the model is called with weights that depend on its own."""
        model, x, y = critic(), data(4, 3), data(4, 1, seed=1)
        kfac, own = preconditioner(model), dict(model.named_parameters())

        def adapted():
            inner = F.mse_loss(model(x), y)
            slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            there = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
            return F.mse_loss(functional_call(model, there, (x,)), y)

        model(x).mean().backward()
        with kfac.unwatched():
            adapted().backward()
        kfac.step()

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    @pytest.mark.parametrize("normed", [False, True], ids=["plain", "watched at its call"])
    def test_dual_numbers(self, normed):
        model, x = critic(), data(4, 3)
        if normed:
            model = nn.Sequential(*(weight_norm(m) if len([*m.parameters()]) else m for m in model))
        kfac = preconditioner(model)
        u, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (model(x) + u + tangent.square()).mean().backward()
        with pytest.raises(CaptureError, match=r"depends on \w*Linear .* through torch\.func"):
            kfac.step()

    def test_per_sample_gradients_by_torch_func(self):
        model, x = critic(), data(4, 3)
        kfac = preconditioner(model)
        slopes = vmap(grad(lambda z: model(z).sum()))(x)
        (model(x).mean() + slopes.square().mean()).backward()
        with pytest.raises(CaptureError, match=r"depends on Linear .* through torch\.func"):
            kfac.step()

    def test_weights_that_are_computed_from_its_own(self):
        model, x = critic(), data(4, 3)
        kfac = preconditioner(model)
        others = {name: 2.0 * p for name, p in model.named_parameters()}
        (model(x).mean() + functional_call(model, others, (x,)).mean()).backward()
        with pytest.raises(CaptureError, match=r"depends on Linear .* by weights that were comp"):
            kfac.step()

    def test_natural_muon(self):
        model = critic()
        optimizer = NaturalMuon(model, update_every=1)
        penalty(model, data(4, 3)).mean().backward()
        with pytest.raises(CaptureError, match="The loss depends on gradients"):
            optimizer.step()
        optimizer = NaturalMuon(critic(), structure=Kronecker(sharing="traces"), update_every=1)
        penalty(optimizer.kfac.model, data(4, 3)).mean().backward()
        optimizer.step()


class TestTeachers:
    """Forward passes with weights that are none of the model's, and no part of its gradients."""

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("recorded", [False, True], ids=["without a graph", "recorded"])
    @pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
    def test_they_change_nothing(self, recorded, before):
        results = []
        for taught in (False, True):
            model, x = critic(), data(4, 3)
            kfac = preconditioner(model)

            def teach(model=model, x=x):
                mean = {name: 0.9 * p.detach() for name, p in model.named_parameters()}
                with torch.set_grad_enabled(recorded):
                    return functional_call(model, mean, (data(7, 3, seed=2),))

            for _ in range(2):
                model.zero_grad()
                if taught and before:
                    teach()
                out = model(x)
                if taught and not before:
                    teach()
                out.square().mean().backward()
                kfac.step()
            results.append((factors(kfac), [p.grad for p in model.parameters()]))
        same(*results)


class TestUnwatched:
    @pytest.mark.parametrize("model", [critic, images], ids=["linear", "convolution"])
    def test_the_curvature_is_that_of_the_rest(self, model):
        shape = (4, 3) if model is critic else (4, 1, 4, 4)
        results, gradients = [], []
        for penalised in (False, True):
            net = model()
            kfac = preconditioner(net)
            loss = net(data(*shape)).square().mean()
            if penalised:
                with kfac.unwatched():
                    loss = loss + penalty(net, data(*shape, seed=1)).mean()
            loss.backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
            kfac.step()
            results.append(factors(kfac))
        same(*results)
        assert not torch.allclose(gradients[0][0], gradients[1][0])
        assert not kfac.capture.ignores


class TestOnlyLookedAt:
    """Gradients that are no part of the loss change nothing."""

    def hessian_by_inputs(self, model, x):
        z = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        torch.autograd.grad(slope.sum(), z)

    def product_by_hand(self, model, x):
        own = list(model.parameters())
        slopes = torch.autograd.grad(model(x).square().mean(), own, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in slopes), own)

    def operator(self, model, x):
        H = natgrad.hessian(model, nn.MSELoss(), (x, torch.zeros(len(x), 1).double()))
        assert (H @ torch.ones(H.shape[1], dtype=torch.float64)).isfinite().all()

    def functional(self, model, x):
        vmap(grad(lambda z: model(z).sum()))(x)

    @pytest.mark.parametrize(
        "look", ["hessian_by_inputs", "product_by_hand", "operator", "functional"]
    )
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_statistics_are_the_same(self, look, when):
        results = []
        for looks in (False, True):
            model, x = critic(), data(6, 3)
            kfac = preconditioner(model)
            if looks and when == "before":
                getattr(self, look)(model, x)
            model(x).square().mean().backward()
            if looks and when == "after":
                getattr(self, look)(model, x)
            kfac.step()
            results.append(factors(kfac))
        same(*results)
