"""What a step must give for a random network: the oracle's dense blocks, one step after the other.

`tests/oracles.py` sees every call of one forward and backward pass; here are its passes over
several steps, as running averages, and what geometry and clip make of a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import recurrent_cases
from cases import Case
from natgrad import EKFAC, Cholesky, Diagonal, Full, Kronecker, Spectral, UnitWise
from natgrad.geometry import Euclidean, Geometry
from natgrad.linalg.polar import exact_polar
from oracles import Truth, Use, View

Losses = Callable[[Tensor, Tensor], Tensor]
CASES = {axis: Case("fuzz", nn.Identity, lambda n: (), batch_axis=axis) for axis in (0, 1)}


def losses(out: Tensor, rows: Tensor) -> Tensor:
    """One a sample; ``rows`` are the samples' numbers."""
    each = torch.linspace(0.3, 1.7, out.shape[1], dtype=out.dtype) * 1.5
    sign = 1 - 2 * (torch.arange(out.shape[1]) % 3 == 1).to(out.dtype)
    return F.softplus(each * sign * out).sum(1)


def seen(model: nn.Module, x: Tensor, each: Losses) -> Truth:
    """Of one batch, sample by sample."""
    calls, rows, n = oracles.record(model, (x,)), torch.arange(len(x)), len(x)
    total = each(calls.out, rows).sum()
    reached = [call for call in calls.calls if call.out.requires_grad]  # not before all that trains
    outs = [call.out for call in reached]
    gs = torch.autograd.grad(total, outs, retain_graph=True, materialize_grads=True)
    views: dict[str, View] = {}
    for call, g in zip(reached, gs, strict=True):
        case = CASES[getattr(call.module, "samples_axis", 0)]
        if isinstance(call.module, nn.RNNBase):
            found: Any = recurrent_views(call, g)
        else:
            found = oracles.views_of(case, model, call, g, n)
        for view in found:
            known = views.setdefault(view.name, view)
            if known is not view:
                known.uses += view.uses
                known.transposed += view.transposed
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    samples = []
    for i in range(n):
        loss = each(model(x[i : i + 1]), rows[i : i + 1]).sum()
        samples.append(torch.autograd.grad(loss, list(trained.values()), materialize_grads=True))
    columns = zip(*samples, strict=True)
    per_sample = {k: torch.stack(g) for k, g in zip(trained, columns, strict=True)}
    mean = {k: g.mean(0) for k, g in per_sample.items()}
    return Truth(n, views, mean, per_sample)


def gaussian(model: nn.Module, x: Tensor) -> Truth:
    """The exact Fisher of a Gaussian with variance 1, ``Σ_k J_k^T J_k``: every output is a sample
    of its own, so blocks are too small by their number."""
    with torch.no_grad():
        outputs = model(x[:1]).shape[1]

    def one_output(out: Tensor, rows: Tensor) -> Tensor:
        return out[torch.arange(len(out)), rows % outputs]

    found = seen(model, x.repeat_interleave(outputs, 0), one_output)
    for view in found.views.values():
        view.uses = [Use(u.a, u.g * outputs**0.5, u.used) for u in view.uses]
        view.transposed = [Use(u.a, u.g * outputs**0.5, u.used) for u in view.transposed]
    found.per_sample = {k: g * outputs**0.5 for k, g in found.per_sample.items()}
    return found


def recurrent_views(call: oracles.Call, g: Tensor) -> list[View]:
    """By a loop over samples, layers and time steps."""
    rnn, x = call.module, call.args[0].detach()
    if not rnn.batch_first:
        x, g = x.transpose(0, 1), g.transpose(0, 1)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for sample, own in zip(x, g, strict=True):
        out, parts = recurrent_cases.loop(rnn, sample)
        outputs = [o for name in parts for _, o in parts[name]]
        found = iter(torch.autograd.grad(out, outputs, own, materialize_grads=True))
        for name, steps in parts.items():
            a = torch.stack([a.detach() for a, _ in steps])
            if rnn.bias:
                a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
            pairs.setdefault(name, []).append((a, torch.stack([next(found) for _ in steps])))

    def view(name: str, each: list[tuple[Tensor, Tensor]]) -> View:
        names = call.names(f"weight_{name}", *([f"bias_{name}"] if rnn.bias else []))

        def matrix(named: oracles.Named) -> Tensor:
            return torch.cat([named[k].reshape(len(named[k]), -1) for k in names], 1)[None]

        a, gs = (torch.stack(t)[None] for t in zip(*each, strict=True))
        return View(f"{call.name}.{name}", matrix, [Use(a, gs)])

    return [view(name, each) for name, each in pairs.items()]


@dataclass
class History:
    """Batches that were seen, the last one last, with the weight of the past."""

    truths: list[Truth]
    decay: float

    def mean(self, of: Callable[[Truth], Any]) -> Any:
        shares = [self.decay**age for age in reversed(range(len(self.truths)))]
        kept = [(w, t) for w, t in zip(shares, self.truths, strict=True) if w]
        total = sum(w for w, _ in kept)
        return sum(of(t) * (w / total) for w, t in kept)

    def view(self, name: str) -> View:
        return self.truths[-1].views[name]

    def factors(self, name: str, sharing: str) -> tuple[Tensor, Tensor]:
        """``A`` and ``G``; of a weight that is used from both sides both pairs are averaged before
        they are merged, as `oracles.kronecker` does."""

        def moment(transposed: bool, index: int) -> Tensor:
            def of(truth: Truth) -> Tensor:
                view = truth.views[name]
                uses = view.uses
                if transposed:
                    uses = [Use(u.g, u.a, u.used) for u in view.transposed]
                # A batch of nothing but padding has no mean, and no curvature.
                return oracles.second_moments(uses, truth.n, sharing)[index].nan_to_num(0.0)

            return self.mean(of)

        view, diagonal = self.view(name), oracles.keep_diagonal
        A = G = At = Gt = None
        if view.uses:
            A, G = moment(False, 0), moment(False, 1)
            A = diagonal(A) if view.diagonal_inputs else A
        if view.transposed:
            Gt, At = moment(True, 0), diagonal(moment(True, 1))
        if A is None or not any(u.used.any() for t in self.truths for u in t.views[name].uses):
            return At, Gt  # an embedding of which nothing but padding was seen has no share in it
        if At is None:
            return A, G
        s = oracles.trace(A) / oracles.trace(At)
        s = torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))
        return (A + s * At) / 2, G + Gt / s

    def whole(self, name: str) -> Tensor:
        """The mean of ``vec(dW) vec(dW)^T`` of samples."""
        return self.mean(lambda t: oracles.fisher(t.sample_matrices(t.views[name])))


def blocks_of(history: History, name: str, structure: object) -> tuple[Tensor, ...]:
    """``(F,)`` dense, or ``(A, G)`` by group."""
    if isinstance(structure, Kronecker | EKFAC) and not history.view(name).elementwise:
        return history.factors(name, getattr(structure, "sharing", "expand"))
    whole = history.whole(name)
    if isinstance(structure, Full):
        return (whole,)
    if isinstance(structure, Diagonal):
        return (whole.diagonal().diag(),)
    shape = history.truths[-1].sample_matrices(history.view(name)).shape[1:]
    assert isinstance(structure, UnitWise | Kronecker | EKFAC)
    return (oracles.unit_wise(whole, shape),)


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-300).pow(exponent).unsqueeze(-2)) @ vectors.mT


def stepped(
    block: tuple[Tensor, ...], m: Tensor, damping: float, inverse: object, geometry: Geometry
) -> tuple[Tensor | None, float]:
    """What a step makes of the gradient ``m [groups, rows, cols]``; None where rounding decides.
    And by how much a polar factor makes rounding errors larger."""
    if len(block) == 2:
        A, G = block
        # The papers' pi where a factor is zero: 1.
        own = [t.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for t in (A, G)]
        pi = torch.where((own[0] > 0) & (own[1] > 0), own[0] / own[1], 1.0).sqrt()
        eyes = [torch.eye(t.shape[1], dtype=t.dtype) for t in (A, G)]
        damped = A + damping**0.5 * pi * eyes[0], G + damping**0.5 / pi * eyes[1]

        def sides(t: Tensor, exponent: float) -> Tensor:
            a, g = (power(one, exponent) for one in damped)
            return g @ t @ a

        whole = oracles.kronecker_block(A, G)
    else:
        whole = block[0]
    joint = whole + damping * torch.eye(len(whole), dtype=whole.dtype)

    def together(t: Tensor, exponent: float) -> Tensor:
        return (power(joint, exponent) @ t.flatten()).view(t.shape)

    if isinstance(geometry, Spectral):
        whiten = sides if len(block) == 2 else together
        white = whiten(m, -geometry.power / 2)
        values = torch.linalg.svdvals(white)
        if float(values.min()) < 1e-4 * float(values.max()) or float(values.min()) < 1e-8:
            return None, 1.0  # the polar factor of what is rounding only is anything
        step = whiten(exact_polar(white), -geometry.power / 2)
        return step / step.square().mean().sqrt(), float(values.max() / values.min())
    assert isinstance(geometry, Euclidean)
    apart = len(block) == 2 and (geometry.factored or isinstance(inverse, Cholesky))
    return (sides if apart else together)(m, -geometry.power), 1.0


def condition(block: tuple[Tensor, ...], damping: float) -> float:
    """How much rounding errors may grow."""
    sizes = [float(torch.linalg.matrix_norm(t, 2).max()) for t in block]
    largest = sizes[0] * (sizes[1] if len(sizes) == 2 else 1.0)
    return 1.0 + largest / damping


def kl_scale(pairs: Sequence[tuple[Tensor, Tensor]], rate: float, clip: float) -> float:
    """Pauloski 2022, eq. 16, of preconditioned and plain gradients."""
    total = sum(rate**2 * abs(float((one * other).sum())) for one, other in pairs)
    return min(1.0, (clip / total) ** 0.5) if total else 1.0
