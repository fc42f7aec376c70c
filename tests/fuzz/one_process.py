"""Random networks, call patterns and settings in one process, beside dense blocks in float64."""

import copy
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context, event
from hypothesis import strategies as st
from torch import Tensor

from fuzz.__main__ import of_strategy
from fuzz.expected import (
    History,
    blocks_of,
    condition,
    gaussian,
    kl_scale,
    losses,
    seen,
    stepped,
)
from fuzz.networks import Around, Network, networks
from natgrad import (
    KFAC,
    Cholesky,
    Diagonal,
    Eigen,
    ExactFisher,
    Full,
    Kronecker,
    MeanLoss,
    Spectral,
    SumLoss,
    UnitWise,
)
from natgrad.curvature import Gaussian
from natgrad.errors import CaptureError
from natgrad.geometry import Euclidean

RATE = 0.1


@dataclass(frozen=True)
class Batch:
    """One step: micro-batches, and what is called between and around them."""

    sizes: tuple[int, ...]
    evaluated: int = 0  # samples of a forward pass without gradients, before each micro-batch
    unused: int = 0  # of one with gradients that never come back
    retried: bool = False  # a backward pass before, that is discarded
    retained: bool = False  # two backward passes over each graph, of parts of the loss


@dataclass(frozen=True)
class Settings:
    structure: Any = None
    inverse: Any = Eigen()  # noqa: RUF009 (frozen)
    geometry: Any = Euclidean()  # noqa: RUF009 (frozen)
    exact: bool = False
    damping: float = 0.1
    decay: float = 0.0
    clip: float | None = None
    total: bool = False  # the loss is a sum over samples
    single: bool = False  # in float32
    wide: bool = False  # factors in float64 nevertheless
    parts: bool = False  # the network's two halves are called, not the network


structures = st.sampled_from(
    [None, Kronecker(), Kronecker("reduce"), UnitWise(), Diagonal(), Full(limit=10_000)]
)
settings_of_kfac = st.builds(
    Settings,
    structures,
    st.sampled_from([Eigen(), Cholesky()]),
    st.sampled_from(
        [
            Euclidean(),
            Euclidean(),
            Euclidean(0.5),
            Euclidean(factored=True),
            Spectral(floor=1e-9),
            Spectral(1.0, floor=1e-9),
        ]
    ),
    st.booleans(),
    st.sampled_from([0.01, 0.1, 3.0]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, None, 1e-3]),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)
batches = st.builds(
    Batch,
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0, 0, 2, 5]),
    st.sampled_from([0, 0, 0, 3]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
)


CASES = st.tuples(networks(), settings_of_kfac, st.lists(batches, min_size=1, max_size=2))


def run(network: Network, settings: Settings, steps: list[Batch]) -> None:
    settings = allowed(network, settings)
    several = settings.exact or any(batch.retained for batch in steps)
    if not (several and network.checkpointed and trained_inside(network)):
        compare(network, settings, steps)
        return
    # torch's own sentence where a layer in front of the checkpoint would have to be reached.
    refused = pytest.raises((CaptureError, RuntimeError), match=r"use_reentrant=(True|False)")
    if settings.parts and any(batch.evaluated for batch in steps):
        refused = suppress(CaptureError, RuntimeError)  # a warning that counts are in doubt will do
    with refused:
        compare(network, settings, steps)


def trained_inside(network: Network) -> bool:
    """Whether a checkpoint has something that is trained."""
    pieces = network.build().pieces
    return any(p.requires_grad for p in pieces.parameters())


def allowed(network: Network, settings: Settings) -> Settings:
    """Without what is refused in other tests, or has nothing to be compared with."""
    if isinstance(settings.inverse, Cholesky) and settings.geometry == Euclidean(0.5):
        settings = replace(settings, inverse=Eigen())
    if isinstance(settings.geometry, Spectral):  # its length is its own
        settings = replace(settings, clip=None)
    if settings.single:  # rounding errors of single precision over those of the curvature
        settings = replace(settings, damping=max(settings.damping, 0.1))
    return settings


def compare(network: Network, settings: Settings, steps: list[Batch]) -> None:
    dtype = torch.float32 if settings.single else torch.float64
    model = network.build(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    kfac = KFAC(
        model,
        optimizer,
        kl_clip=settings.clip,
        damping=settings.damping,
        factor_decay=settings.decay,
        update_every=1,
        refresh_every=1,
        structure=settings.structure,
        inverse=settings.inverse,
        geometry=settings.geometry,
        curvature=ExactFisher(Gaussian()) if settings.exact else None,
        loss=(SumLoss if settings.total else MeanLoss)(
            batch_axis=axes(model, steps, settings.parts)
        ),
        factor_dtype=torch.float64 if settings.wide else None,
    )
    curved, plain = History([], settings.decay), History([], 0.0)
    told: list[str] = []  # each sentence is said once
    passed: list[tuple[Any, Tensor]] = []  # weights and inputs of each step
    for index, batch in enumerate(steps):
        told += take(network, model, kfac, settings, batch, index, dtype)
        twin = replace(network, checkpointed=None).build()
        twin.load_state_dict(model.state_dict())
        x = torch.cat(inputs(network, batch, index))
        passed.append((twin, x))
        plain.truths.append(seen(twin, x, losses))
        curved.truths.append(gaussian(twin, x) if settings.exact else plain.truths[-1])
        shaken = partial(shaken_histories, passed, settings, dtype)
        judge(network, model, kfac, settings, plain, curved, told, shaken, x)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(index)
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
    kfac.detach()


def shaken_histories(passed, settings, dtype) -> tuple[History, History]:
    """The same with weights that differ by rounding errors: what a network makes of those, such as
    a norm layer behind another one, which has nearly nothing to divide by."""
    plain, curved = History([], 0.0), History([], settings.decay)
    generator = torch.Generator().manual_seed(0)
    for twin, x in passed:
        other = copy.deepcopy(twin)
        with torch.no_grad():
            for p in other.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p *= 1 + 4 * torch.finfo(dtype).eps * noise.to(p)
        plain.truths.append(seen(other, x, losses))
        curved.truths.append(gaussian(other, x) if settings.exact else plain.truths[-1])
    return plain, curved


def rounded_by_torch(network, model, plain, name, x) -> float:
    """How far the plain gradient of a network in its own precision is from the oracle's: a norm
    layer of two numbers gives plus and minus one, and of what follows only rounding is left."""
    twin = replace(network, checkpointed=None).build(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    x = x.to(next(twin.parameters()).dtype) if x.is_floating_point() else x
    losses(twin(x), torch.arange(len(x))).mean().backward()
    found = {k: p.grad.double() for k, p in twin.named_parameters() if p.grad is not None}
    expected = plain.truths[-1].mean_matrix(plain.view(name))
    error = plain.view(name).matrix(found) - expected
    return float(error.norm() / expected.norm().clamp(min=1e-12))


def axes(model, steps, parts) -> dict[str, int]:
    """Which layers have their tokens in front; said where sizes cannot tell, or nobody has said how
    many samples there are."""
    sizes = {n for batch in steps for n in batch.sizes}
    found = ((name, m) for name, m in model.named_modules() if isinstance(m, Around))
    return {
        f"{name}.inner": 1
        for name, m in found
        if m.way == "tokens_first" and (parts or m.tokens in sizes)
    }


def inputs(network, batch, index):
    return [network.inputs(n, 100 * index + i) for i, n in enumerate(batch.sizes)]


def take(network, model, kfac, settings, batch, index, dtype) -> list[str]:
    """One step; returns what natgrad has warned of."""
    call = (lambda x: model.tail(model.front(x))) if settings.parts else model

    def cast(x):
        return x if network.start[0] == "words" else x.to(dtype)

    def backward(x, samples, *, again=False):
        out = call(cast(x))
        if settings.exact and settings.parts:
            kfac.observe(out)
        total = losses(out, torch.arange(len(x))).sum()
        loss = total if settings.total else total / samples
        if batch.retained and not again:
            (0.3 * loss).backward(retain_graph=True)
            (0.7 * loss).backward()
        else:
            loss.backward()

    samples = sum(batch.sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.zero_grad()
        if batch.retried:
            backward(network.inputs(2, 7), 2, again=True)
            model.zero_grad()
            kfac.discard()
        for x in inputs(network, batch, index):
            if batch.evaluated:
                with torch.no_grad():
                    call(cast(network.inputs(batch.evaluated, 8)))
            if batch.unused and not settings.parts:
                call(cast(network.inputs(batch.unused, 9)))
            backward(x, samples)
        kfac.step()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def mark(what: str) -> None:
    """For hypothesis's statistics; also outside of a test, where a case is done again."""
    if currently_in_test_context():
        event(what)


def expectation(kfac, settings, plain, curved) -> tuple[dict[str, Any], dict[str, float], float]:
    """Of each block: its step before the clip, and by how much rounding errors grow; the clip."""
    expected, grow = {}, {}
    for block in kfac.blocks:
        dense = blocks_of(curved, block.name, block.structure)
        m = plain.truths[-1].mean_matrix(plain.view(block.name))
        expected[block.name], grows = stepped(
            dense, m, settings.damping, settings.inverse, settings.geometry
        )
        grow[block.name] = grows * condition(dense, settings.damping)
    scale = 1.0
    if settings.clip is not None:
        pairs = [
            (expected[b.name], plain.truths[-1].mean_matrix(plain.view(b.name)))
            for b in kfac.blocks
        ]
        scale = kl_scale(pairs, RATE, settings.clip)
    return expected, grow, scale


def judge(network, model, kfac, settings, plain, curved, told, shaken, x) -> None:
    found = {k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None}
    eps = torch.finfo(torch.float32 if settings.single else torch.float64).eps
    expected, grow, scale = expectation(kfac, settings, plain, curved)
    bound = {name: 2e4 * eps * own for name, own in grow.items()}
    for name, want in expected.items():
        got = plain.view(name).matrix(found)
        assert torch.isfinite(got).all(), name
        if want is None:
            mark("a polar factor that rounding decides")
            continue
        # Positions that cancel leave their rounding errors behind.
        size = max(float(want.norm()), 1e-3)
        error = float((got - scale * want).norm()) / (scale * size)
        if error > bound[name]:  # the network itself may make more of rounding errors
            others, _, its = expectation(kfac, settings, *shaken())
            other = want if others[name] is None else others[name]
            bound[name] += 100 * float((its * other - scale * want).norm()) / (scale * size)
            bound[name] += 10 * rounded_by_torch(network, model, plain, name, x)
            mark("a network that makes much of rounding errors")
        assert error <= bound[name] or told, (name, error, bound[name])
        if error > bound[name]:
            mark("not the oracle's, and a warning says so")


FUZZED = of_strategy(CASES, run)
