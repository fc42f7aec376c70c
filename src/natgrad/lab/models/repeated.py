"""A pass through many equal layers in a row, counted on a few of them.

    count(L) = count(k) + (L - k) (count(k) - count(k - 1))

A container with many equal children is cut to two, three and four of them. What follows from two
and three must be the count of four, in every number; only then all are taken to go on so. Otherwise
(layers that see what all before them gave, numbers that depend on the depth) all are counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count as numbers
from itertools import takewhile
from typing import Any

from torch import nn

_FEWEST = 10  # equal layers, of which nine are gone through


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward pass of one sample.

    Arguments:
        module: that was called.
        positions: numbers of its output for each channel.
        source: its first input, by identity.
    """

    module: nn.Module
    positions: float
    source: int


@dataclass(frozen=True)
class Counted:
    """A forward and a backward pass of some samples.

    Arguments:
        forward: operations of the forward pass.
        backward: operations of the backward pass.
        saved: bytes that are kept between both.
        calls: of modules with parameters, in order.
        arrivals: parameters whose gradients have come, in order, each with the operations of the
            backward pass that were done.
    """

    forward: float
    backward: float
    saved: int
    calls: tuple[Call, ...]
    arrivals: tuple[tuple[nn.Parameter, float], ...]


def counted(model: nn.Module, count: Callable[[], Counted]) -> Counted:
    """What ``count`` finds, from as few layers as tell.

    Arguments:
        model: that it goes through.
        count: goes through the model as it is.
    """
    container = _repeated(model)
    if container is None:
        return count()
    layers = list(container.children())
    try:
        two, three, four = (_with(container, kept, count) for kept in (2, 3, 4))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError):
        return count()  # which says what is wrong, if anything is
    expected = _longer(two, three, layers, 4)
    if expected is None or _numbers(expected) != _numbers(four):
        return count()
    return _longer(three, four, layers, len(layers)) or count()


def _repeated(model: nn.Module) -> nn.Module | None:
    """The container of most equal layers, each with parameters of its own."""
    best: nn.Module | None = None
    most = _FEWEST - 1
    for module in model.modules():
        children = list(module.children())
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(children) > most:
            own = [id(p) for child in children for p in child.parameters()]
            if len({*own}) == len(own) and len({_likeness(child) for child in children}) == 1:
                best, most = module, len(children)
    return best


def _likeness(layer: nn.Module) -> tuple[Any, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    sizes = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)
    return repr(layer), sizes


def _with(container: nn.Module, kept: int, count: Callable[[], Counted]) -> Counted:
    """The count with the first children of the container alone."""
    whole = container._modules
    container._modules = dict(list(whole.items())[:kept])
    try:
        return count()
    finally:
        container._modules = whole


def _longer(
    shorter: Counted, longer: Counted, layers: Sequence[nn.Module], total: int
) -> Counted | None:
    """Of ``total`` layers, from the counts of k - 1 and of k; None if gradients do not come layer
    after layer, from the last one on."""
    modules = [dict(layer.named_modules()) for layer in layers[:total]]
    parameters = [dict(layer.named_parameters()) for layer in layers[:total]]
    at = {id(m): (i, name) for i, own in enumerate(modules) for name, m in own.items()}
    owner = {id(p): (i, name) for i, own in enumerate(parameters) for name, p in own.items()}
    k = 1 + max((at[id(c.module)][0] for c in longer.calls if id(c.module) in at), default=0)
    further, each = total - k, longer.backward - shorter.backward

    # Forward: behind the calls of the last layer come those of the others.
    calls, fresh = list(longer.calls), numbers(1)
    own = [n for n, call in enumerate(calls) if at.get(id(call.module), (-1,))[0] == k - 1]
    if not own or own != list(range(own[0], own[-1] + 1)):
        return None
    pattern = [calls[n] for n in own]
    added: list[Call] = []
    for index in range(k, total):
        sources = {call.source: -next(fresh) for call in pattern}
        added += [
            replace(
                call,
                module=modules[index][at[id(call.module)][1]],
                source=sources[call.source],
            )
            for call in pattern
        ]
    calls[own[-1] + 1 : own[-1] + 1] = added

    # Backward: the last layer comes first.
    before = list(takewhile(lambda one: id(one[0]) not in owner, longer.arrivals))
    rest = longer.arrivals[len(before) :]
    inside = list(takewhile(lambda one: id(one[0]) in owner, rest))
    after = rest[len(inside) :]
    places = [n for n, one in enumerate(inside) if owner[id(one[0])][0] == k - 1]
    first = inside[: len(places)]
    if not first or places != list(range(len(first))) or len(inside) != k * len(first):
        return None
    arrivals = list(before)
    for turn, index in enumerate(reversed(range(total))):
        arrivals += [(parameters[index][owner[id(p)][1]], done + turn * each) for p, done in first]
    arrivals += [(p, done + further * each) for p, done in after]
    return Counted(
        longer.forward + further * (longer.forward - shorter.forward),
        longer.backward + further * each,
        longer.saved + further * (longer.saved - shorter.saved),
        tuple(calls),
        tuple(arrivals),
    )


def _numbers(found: Counted) -> tuple[Any, ...]:
    """All of it that can be compared: inputs by which calls have the same."""
    order: dict[int, int] = {}
    calls = [
        (id(call.module), call.positions, order.setdefault(call.source, len(order)))
        for call in found.calls
    ]
    arrivals = [(id(p), done) for p, done in found.arrivals]
    return found.forward, found.backward, found.saved, calls, arrivals
