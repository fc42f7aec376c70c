"""Modules that call one known function on their weight, with something before, after or inside.

A forward hook of a module sees what goes in and what comes out. That is not the function's own
input and output where a module pads its input first or has an activation behind its norm, and the
function's weight is not the parameter where it is computed from it. So these modules are watched at
the call itself (`natgrad.capture.function_hooks`), of ``F.conv2d``, ``F.linear``, ``F.embedding``
or a norm.

A computed weight is covered where each row is a multiple of the parameter's own,

    W[r] = s[r] p[r]    or    W[r] = s[r] (p[r] - mean(p[r])),

as in weight normalisation (Salimans and Kingma 2016), spectral normalisation (Miyato et al. 2018)
and weight standardisation (Qiao et al. 2019). The gradient of a sample with respect to ``p[r]`` is
then ``s[r] Σ_s g[s, r] a[s]``, but for what a change of ``s`` takes off: a part along ``p[r]``, or
along the outer product of two singular vectors, and that along the mean. This part is left in the
factors: the block is ``(S G S) ⊗ A`` with ``S = diag(s)``, read off at every call, and the gradient
that it is applied to is what is left of it.
A bias is a block of its own, since ``s`` does not act on it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.layers.base import Layer, trainable
from natgrad.layers.registry import first_of_all, views_of_base

# Where a function has its weight, if it is not given by name.
WEIGHT_AT: dict[Callable[..., Any], int] = {
    F.linear: 1,
    F.embedding: 1,
    F.conv1d: 1,
    F.conv2d: 1,
    F.conv3d: 1,
    F.layer_norm: 2,
    F.rms_norm: 2,
    F.group_norm: 2,
    F.batch_norm: 3,
}
FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: F.linear,
    nn.Embedding: F.embedding,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.LayerNorm: F.layer_norm,
    nn.RMSNorm: F.rms_norm,
    nn.GroupNorm: F.group_norm,
    nn.BatchNorm1d: F.batch_norm,
    nn.BatchNorm2d: F.batch_norm,
    nn.BatchNorm3d: F.batch_norm,
}
_SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # whose weight may be computed
Rows = Literal["as they are", "scaled", "scaled and centred"]


class Call(NamedTuple):
    """The call that a layer is watched at. ``rows``: how those of the function's weight come from
    the parameter's, which is ``source`` in the module."""

    function: Callable[..., Any]
    rows: Rows = "as they are"
    source: str = "weight"


def weight_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The weight that a function of `WEIGHT_AT` is called with.

    Arguments:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    at = WEIGHT_AT[function]
    return args[at] if len(args) > at else kwargs.get("weight")


def row_scales(weight: Tensor, parameter: Tensor, *, centred: bool) -> Tensor:
    """``s [rows]``: how much longer each row of the weight is than the parameter's.

    Arguments:
        weight: ``[rows, ...]``, as the function is called with it.
        parameter: of the same shape.
        centred: whether the mean of each row is taken off.
    """
    own, p = weight.detach().flatten(1), parameter.detach().flatten(1)
    if centred:
        p = p - p.mean(1, keepdim=True)
    scales: Tensor = own.norm(dim=1) / p.norm(dim=1).clamp(min=torch.finfo(p.dtype).tiny)
    return scales


class Recorded(TorchFunctionMode):
    """Keeps the calls of one function, and may cut the graph behind its weights.

    Arguments:
        function: the function.
        cut: whether it is called with weights that nothing can be differentiated by.
    """

    def __init__(self, function: Callable[..., Any], *, cut: bool = False) -> None:
        super().__init__()
        self.function, self.cut = function, cut
        self.calls: list[tuple[Tensor, Any, Any]] = []  # input, weight, output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not self.function:
            return func(*args, **kwargs)
        weight = weight_of(func, args, kwargs)
        x = args[0] if args else kwargs["input"]
        if self.cut:
            args = [x, *(_detached(a) for a in args[1:])]
            kwargs = {k: v if k == "input" else _detached(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        self.calls.append((x, weight, out.detach().clone()))  # an activation may work in place
        return out


def call_of(
    base: type[nn.Module], make_twin: Callable[[bool], Any], inputs: Sequence[Tensor]
) -> Call | None:
    """The one call on its weight that is all that a module has to do with it; None if it is not.

    Arguments:
        base: the class with a layer that the module's class derives from.
        make_twin: gives a copy of the module with numbers of its own, in training or not.
        inputs: for which it is tried.
    """
    function = next((f for cls, f in FUNCTIONS.items() if issubclass(base, cls)), None)
    if function is None or not inputs:
        return None
    found = {
        _tried(base, function, lambda: make_twin(training), x)  # noqa: B023 (called at once)
        for training in (True, False)
        for x in inputs
    }
    rows = found.pop()
    return None if found or rows is None else Call(function, rows)


def is_product_inside(make_twin: Callable[[bool], Any], inputs: Sequence[Tensor]) -> bool:
    """Whether all that a module of an unknown class has to do with ``weight [rows, inputs]``, and
    ``bias`` if it has one, is one call of ``F.linear``, whatever it does with the result: a router
    of a mixture of experts, which gives probabilities and chosen experts as well.

    Arguments:
        make_twin: gives a copy of the module with numbers of its own, in training or not.
        inputs: for which it is tried.
    """
    return all(_is_product(make_twin, training, x) for training in (True, False) for x in inputs)


def _is_product(make_twin: Callable[[bool], Any], training: bool, x: Tensor) -> bool:
    twin, recorded = make_twin(training), Recorded(F.linear)
    with recorded:
        out = _run(twin, x)
    if out is None or len(recorded.calls) != 1:
        return False
    given, weight, made = recorded.calls[0]
    if weight is not twin.weight or weight.ndim != 2 or given.shape[-1] != weight.shape[1]:
        return False
    bias = twin._parameters.get("bias")  # the one that is added, not another use of it
    known = F.linear(given, weight, bias)
    alike = known.shape == made.shape and torch.allclose(known, made.to(known.dtype), 1e-4, 1e-6)
    return alike and _only_there(make_twin(training), x, F.linear)


def called_layers(name: str, module: nn.Module, call: Call) -> list[Layer[Any]]:
    """The layers of a module that is watched at its call.

    Arguments:
        name: of the module in the model.
        module: of a class that derives from one with a layer.
        call: where the weight is used.
    """
    if call.rows != "as they are":
        return _scaled_layers(name, module, "weight", call)
    layer = _one(name, module)
    layer.call = call
    return [layer]


def _scaled_layers(name: str, module: nn.Module, source: str, call: Call) -> list[Layer[Any]]:
    """That of the parameter which the weight comes from, ``source``, and the bias."""
    weight, bias = _one(name, module), _one(name, module)
    weight.weight, weight.bias = trainable(module.get_parameter(source)), None
    weight.call = call._replace(source=source)
    bias.weight, bias.name = None, f"{name}.bias" if name else "bias"
    bias.call = Call(call.function)
    return [layer for layer in (weight, bias) if layer.parameters]


@first_of_all
def parametrised(name: str, module: nn.Module) -> "list[Layer[Any]] | None":
    """The layers of a module with torch's weight or spectral normalisation; None for any other.

    Arguments:
        name: of the module in the model.
        module: any.
    """
    source, known = _source(module), views_of_base(type(module))
    if source is None or known is None or known[0] not in _SCALED:
        return None
    return _scaled_layers(name, module, source, Call(FUNCTIONS[known[0]], "scaled"))


def _source(module: nn.Module) -> str | None:
    """The path of the parameter whose rows are scaled, if there is one."""
    lists: Any = getattr(module, "parametrizations", None)
    if isinstance(lists, nn.ModuleDict) and "weight" in lists:
        held: Any = lists["weight"]
        chain = list(held)
        kinds = [type(one).__name__ for one in chain]
        if kinds == ["_SpectralNorm"]:
            return "parametrizations.weight.original"
        by_rows = kinds == ["_WeightNorm"] and getattr(chain[0], "dim", None) == 0
        return "parametrizations.weight.original1" if by_rows else None
    for hook in module._forward_pre_hooks.values():  # as torch did it before
        if type(hook).__name__ == "WeightNorm" and getattr(hook, "name", "") == "weight":
            return "weight_v" if getattr(hook, "dim", None) == 0 else None
        if type(hook).__name__ == "SpectralNorm" and getattr(hook, "name", "") == "weight":
            return "weight_orig"
    return None


def _one(name: str, module: nn.Module) -> Layer[Any]:
    known = views_of_base(type(module))
    assert known is not None
    made = known[1](name, module)
    assert isinstance(made, Layer)
    return made


def _tried(
    base: type[nn.Module], function: Callable[..., Any], make_twin: Callable[[], Any], x: Tensor
) -> Rows | None:
    """How the rows of the weight come from the parameter's, on one input; None if something else
    is computed."""
    twin = make_twin()
    if twin._parameters.get("weight") is None:
        return None
    recorded = Recorded(function)
    with recorded:
        out = _run(twin, x)
    if not isinstance(out, Tensor) or len(recorded.calls) != 1:
        return None
    given, weight, made = recorded.calls[0]
    if not isinstance(weight, Tensor) or not _is_that_of(base, make_twin(), given, weight, made):
        return None
    return _rows_of(base, weight, twin.weight) if _only_there(make_twin(), x, function) else None


def _run(twin: nn.Module, x: Tensor) -> Any:
    """What comes out; None if the input does not fit, or nothing comes."""
    try:
        with torch.random.fork_rng(devices=[]):
            out = type(twin).forward(twin, x.clone())
    except Exception:  # whatever code it is, it does not take such an input
        return None
    return out


def _is_that_of(base: type[nn.Module], twin: Any, x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether a call does what the base class would do with such an input and weight."""
    twin._parameters["weight"] = weight
    try:
        known = base.forward(twin, x)
    except Exception:
        return False
    return known.shape == out.shape and torch.allclose(known, out.to(known.dtype), 1e-4, 1e-6)


def _rows_of(base: type[nn.Module], weight: Tensor, parameter: Tensor) -> Rows | None:
    if weight is parameter:
        return "as they are"
    if not issubclass(base, _SCALED) or weight.shape != parameter.shape:
        return None
    for rows, centred in (("scaled", False), ("scaled and centred", True)):
        s = row_scales(weight, parameter, centred=centred).unsqueeze(1)
        p = parameter.flatten(1)
        p = p - p.mean(1, keepdim=True) if centred else p
        if torch.allclose(weight.flatten(1), s * p, 1e-4, 1e-7):
            return rows  # type: ignore[return-value]
    return None


def _only_there(twin: Any, x: Tensor, function: Callable[..., Any]) -> bool:
    """Whether nothing is left to differentiate by the parameters once that call is cut off."""
    for p in twin._parameters.values():
        if p is not None:
            p.requires_grad_(True)
    with torch.enable_grad(), Recorded(function, cut=True):
        out = _run(twin, x)
    found = list(tensors_in(out))
    return bool(found) and not any(t.requires_grad for t in found)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that a module returned, in tuples, lists and mappings.

    Arguments:
        value: what it returned.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
