"""Modules with a ``forward`` of their own that compute what a known module does: found by trying.

Libraries write their own RMSNorm, LayerNorm over channels or Linear. A name says little about what
a class computes, and a list of names is never complete. So a twin of the module, with numbers of
its own for parameters and without hooks, is called on a few numbers, and what comes out decides:

    x_hat w (+ b)    with x_hat = (x - mean) / sqrt(var + eps), or x / sqrt(mean(x^2) + eps)
                     over the last axis or over channels; also with 1 + w, whose derivative with
                     respect to w is the same x_hat
    W x (+ b)        with the weight as it is, or transposed
    gamma x          a layer scale, over the last axis or over channels
    f(W h(x) (+ b))  whatever h and f are, if nothing else is done with the weight: a router
    Base.forward(x)  where the class derives from one that has a layer; or that with something
                     around it, or with another weight (`natgrad.layers.called`)

``eps`` is read off the outputs, at inputs so small that it shows. A module that computes anything
else keeps its plain gradient; nothing is guessed. The module itself is never called: FSDP, DTensor,
hooks and running statistics notice nothing.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from natgrad.layers.base import Layer
from natgrad.layers.called import Call, call_of, called_layers, is_product_inside
from natgrad.layers.linear import RowInputs
from natgrad.layers.norm import ChannelNorm, LayerNorm, RMSNorm
from natgrad.layers.registry import Unknown, by_behaviour, views_of_base
from natgrad.layers.scale import Scale

_CLOSE = 2e-5  # relative; modules may compute in float32
_ROUNDING = 1e-6  # of a small number that a bias was added to
_LOOKED_UP = 64
# Rows of inputs have these scales: eps shows in the small ones.
_SCALES = (1.0, 3.0, 1e-2, 1e-3, 1e-5)


# Whose parameters may be used in an expression; those of others are in products, or computed.
_TABLES_AND_VECTORS = (
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)


class MatrixProduct(RowInputs):
    """A module that multiplies its input by its weight, ``[rows, inputs]`` or transposed."""

    def __init__(self, name: str, module: nn.Module, *, transposed: bool) -> None:
        super().__init__(name, module)
        shape = getattr(module, "weight").shape  # noqa: B009 (not every module has one)
        self._shape = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        self._turned = transposed

    @property
    def rows(self) -> int:
        return int(self._shape[0])

    @property
    def inputs_per_row(self) -> int:
        return int(self._shape[1])

    def split(self, weight: Tensor) -> Tensor:
        return weight.mT if self._turned else weight


@by_behaviour
def found(name: str, module: nn.Module) -> "Layer[Any] | list[Layer[Any]] | str | None":
    """The layers of a module, by what it computes; why it has none, if it derives from a class that
    has some; None where nothing is known of it.

    Arguments:
        name: of the module in the model.
        module: one whose class is not registered, or has a forward of its own.
    """
    if isinstance(module, ParametrizationList):  # weight_norm, spectral_norm and the like
        return "a weight is computed from it, and KFAC steps weights themselves"
    if (known := views_of_base(type(module))) is not None:
        base, views = known
        with _children_as_they_were(module):
            if _forward_is_that_of(base, module):
                made = views(name, module)
                return made if isinstance(made, Layer) else list(made)
            other = f"its forward computes something else than that of {base.__name__}"
            if issubclass(base, _TABLES_AND_VECTORS):
                other = Unknown(other)
            return _tried(name, module) or _called_inside(name, module, base) or other
    return _tried(name, module)


@contextmanager
def _children_as_they_were(module: nn.Module) -> Iterator[None]:
    """A twin has the children of its module, whose running statistics a trial would change."""
    before = [(b, b.clone()) for child in module.children() for b in child.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _called_inside(name: str, module: Any, base: type[nn.Module]) -> "list[Layer[Any]] | None":
    """Its layers, if it does with its weight what the base class does, inside of something else."""
    call = call_of(base, _twins(module), list(_inputs(base, module)))
    return None if call is None else called_layers(name, module, call)


def _tried(name: str, module: nn.Module) -> "Layer[Any] | None":
    own = dict(module.named_parameters(recurse=False))
    if len(own) == 1 and (layer := _scale(name, module, next(iter(own.values())))) is not None:
        return layer
    if "weight" not in own or set(own) - {"weight", "bias"} or list(module.children()):
        return None
    if any(p.ndim != 1 for p in own.values() if p is not own["weight"]):
        return None
    if own["weight"].ndim == 1:
        return _norm(name, module)
    if own["weight"].ndim != 2:
        return None
    return _product(name, module) or _product_inside(name, module)


def _scale(name: str, module: nn.Module, parameter: Tensor) -> Scale | None:
    """Of a module that multiplies its input by its only parameter, ``[c]`` or ``[c, 1, 1]``."""
    features = parameter.numel()
    if features < 2 or max(parameter.shape) != features or list(module.children()):
        return None
    twin = _twin(module)
    (gamma,) = (p.flatten() for p in twin._parameters.values() if p is not None)
    last = [_numbers(3, features), _numbers(2, 3, features)]
    if all(_same(_called(twin, x), gamma * x) for x in last):
        return Scale(name, module, parameter, channels=False)
    image = _numbers(2, features, 3, 4)
    if _same(_called(twin, image), gamma.view(-1, 1, 1) * image):
        return Scale(name, module, parameter, channels=True)
    return None


def _product(name: str, module: nn.Module) -> MatrixProduct | None:
    twin = _twin(module)
    weight, bias = twin.weight, twin._parameters.get("bias")
    for transposed in (False, True):
        w = weight.mT if transposed else weight
        if bias is not None and len(bias) != len(w):
            continue
        inputs = [_numbers(3, w.shape[1]), _numbers(2, 3, w.shape[1])]
        if all(_same(_called(twin, x), F.linear(x, w, bias)) for x in inputs):
            return MatrixProduct(name, module, transposed=transposed)
    return None


def _product_inside(name: str, module: nn.Module) -> MatrixProduct | None:
    """Of a module that does more than that with its input: watched at the call."""
    width = int(getattr(module, "weight").shape[1])  # noqa: B009
    if not is_product_inside(_twins(module), [_numbers(3, width), _numbers(2, 3, width)]):
        return None
    layer = MatrixProduct(name, module, transposed=False)
    layer.call = Call(F.linear)
    return layer


def _norm(name: str, module: nn.Module) -> "Layer[Any] | None":
    twin = _twin(module)
    features = len(twin.weight)
    if features < 2:  # normalised numbers are then all alike, whatever the norm
        return None
    scales = torch.tensor(_SCALES, dtype=torch.float64).unsqueeze(1)
    rows = _numbers(len(_SCALES), features) * scales
    for channels in (False, True):
        out = _on_pixels(twin, rows) if channels else _called(twin, rows)
        if out is None or out.shape != rows.shape:
            continue
        for centred in (True, False):
            if (eps := _eps(twin, rows, out, centred=centred)) is None:
                continue
            if channels:
                return ChannelNorm(name, module, features, eps, centred=centred)
            kind = LayerNorm if centred else RMSNorm
            return kind(name, module, (features,), eps)
    return None


def _eps(twin: Any, x: Tensor, out: Tensor, *, centred: bool) -> float | None:
    """``eps`` of the norm that gives ``out`` for the rows of ``x``; None if there is none."""
    shift = twin._parameters.get("bias")
    y = (out if shift is None else out - shift).double()
    x = x.double()
    d = x - x.mean(1, keepdim=True) if centred else x
    squares = d.square().mean(1)
    for weight in (twin.weight.double(), 1 + twin.weight.double()):
        # Of the smallest row: out = weight d / sqrt(squares + eps), solved for eps in the mean.
        size = (weight * d)[-1].square().sum() / y[-1].square().sum().clamp(min=1e-300)
        eps = float(f"{float((size - squares[-1]).clamp(min=0.0)):.4g}")  # as somebody wrote it
        if _same(y, weight * d * (squares + eps).rsqrt().unsqueeze(1)):
            return eps
    return None


def _on_pixels(twin: nn.Module, rows: Tensor) -> Tensor | None:
    """What a module makes of ``[n, c, 2, 2]`` whose pixels are rows ``[p, c]`` and others."""
    images = rows.view(len(rows), -1, 1, 1) * rows.new_tensor([[1.0, 2.0], [4.0, 0.5]])
    out = _called(twin, images)
    if out is None or out.shape != images.shape:
        return None
    return out[:, :, 0, 0]


def _forward_is_that_of(base: type[nn.Module], module: nn.Module) -> bool:
    inputs, twin = list(_inputs(base, module)), _twins(module)
    for training in (True, False):
        for x in inputs:
            mine = _called(twin(training), x)
            known = _called(twin(training), x, base.forward)
            if known is None or not _same(mine, known):
                return False
    return bool(inputs)


def _inputs(base: type[nn.Module], module: Any) -> Iterator[Tensor]:
    """Inputs that a module of a known class takes; none for classes that are not tried."""
    if issubclass(base, nn.Linear):
        yield from (_numbers(3, module.in_features), _numbers(2, 3, module.in_features))
    elif issubclass(base, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # A padding that depends on the size would show in one of them.
        reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        for more in (3, 4):
            yield _numbers(2, module.in_channels, *(r + more for r in reach))
    elif issubclass(base, nn.LayerNorm | nn.RMSNorm):
        yield from (_numbers(3, *module.normalized_shape), _numbers(2, 3, *module.normalized_shape))
    elif issubclass(base, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        space = 0 if issubclass(base, nn.BatchNorm1d) else 2 + issubclass(base, nn.BatchNorm3d)
        yield _numbers(4, module.num_features, *([3] * space))
    elif issubclass(base, nn.GroupNorm):
        yield from (_numbers(3, module.num_channels, 4), _numbers(3, module.num_channels, 2, 3))
    elif issubclass(base, nn.Embedding):
        yield torch.arange(6).view(2, 3) % module.num_embeddings


def _twin(module: nn.Module) -> Any:
    """A copy with parameters of its own, random and on the CPU, own buffers, and no hooks."""
    twin = copy.copy(module)
    state = twin.__dict__ = dict(module.__dict__)
    generator = torch.Generator().manual_seed(1)
    # Of a vocabulary only the entries that are looked up. Sizes alone are read: a slice of a
    # sharded weight would be a collective.
    rows = None
    if isinstance(module, nn.Embedding):
        rows = _LOOKED_UP
        if (module.padding_idx or 0) >= rows:
            state["padding_idx"] = None
    state["_parameters"] = {
        key: None if p is None else _filled(p.shape, rows, generator)
        for key, p in module._parameters.items()
    }
    state["_buffers"] = {
        key: None if b is None else torch.rand(b.shape, generator=generator).to(_wide(b.dtype))
        for key, b in module._buffers.items()
    }
    return twin


def _twins(module: nn.Module) -> Callable[[bool], Any]:
    """Makes further twins, in training or not, with the numbers of one: a random weight takes
    longer than a call. Buffers, which a call may change, are their own."""
    first = _twin(module)

    def make(training: bool) -> Any:
        twin = copy.copy(first)
        state = twin.__dict__ = dict(first.__dict__)
        given, kept = first._parameters, first._buffers
        state["_parameters"] = {k: None if p is None else p.detach() for k, p in given.items()}
        state["_buffers"] = {k: None if b is None else b.clone() for k, b in kept.items()}
        state["training"] = training
        return twin

    return make


def _called(twin: nn.Module, x: Tensor, forward: Callable[..., Any] | None = None) -> Tensor | None:
    """What comes out; None where that is no tensor, or the input does not fit."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = (forward or type(twin).forward)(twin, x.clone())
    except Exception:  # whatever code it is, it does not take such an input
        return None
    return out if isinstance(out, Tensor) else None


def _filled(shape: torch.Size, rows: int | None, generator: torch.Generator) -> Tensor:
    """Random numbers around 1, of at most so many rows."""
    kept = [n if rows is None else min(n, rows) for n in shape[:1]]
    return torch.rand((*kept, *shape[1:]), generator=generator).double() + 0.5


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.shape != b.shape or not a.is_floating_point():
        return False
    scale = b.abs().flatten(1).amax(1) if b.ndim > 1 else b.abs()
    error = (a.double() - b.double()).abs()
    error = error.flatten(1).amax(1) if b.ndim > 1 else error
    return bool((error <= _CLOSE * scale + _ROUNDING).all())
