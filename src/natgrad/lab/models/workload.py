"""What a training step of a model costs, measured without running it.

One forward and one backward pass on the meta device, where tensors have shapes and no numbers.
Products of matrices and convolutions are counted by the formulas of torch's `FlopCounterMode`,
which itself also counts by module and takes longer. Activations are what autograd saves, each
storage once, without the parameters. Attention is counted as the fused kernels do it, which keep no
scores: five products in the backward pass for two in the forward pass (Dao et al. 2022).

Of many equal layers in a row a few are gone through (`repeated`).

The statistics of a block are ``2 d²`` operations a position for a factor ``[d, d]``; layers with
one input (query, key and value) add its products once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from natgrad.capture.blocks import Block
from natgrad.errors import SettingError, first_line
from natgrad.lab.models.repeated import Call, Counted, counted
from natgrad.placement.workload import Arrival, Workload
from natgrad.specs import BlockSpec

_SAMPLES = 2  # norm layers refuse to train on one


@dataclass(frozen=True)
class Passes:
    """A forward and a backward pass, for each sample.

    Arguments:
        parameters: numbers in all parameters that are trained.
        parameter_bytes: bytes of one number of them.
        forward: operations of the forward pass.
        backward: operations of the backward pass.
        activations: bytes that are kept between both.
        calls: of modules with parameters, in order.
        arrivals: parameters whose gradients have come, in order, each with the share of the
            backward pass that was done.
    """

    parameters: int
    parameter_bytes: int
    forward: float
    backward: float
    activations: float
    calls: tuple[Call, ...]
    arrivals: tuple[tuple[nn.Parameter, float], ...]

    def workload(
        self,
        blocks: Sequence[Block],
        specs: Sequence[BlockSpec],
        *,
        batch: int = 1,
        optimizer_bytes: int = 4,
        measured: float = 1.0,
    ) -> Workload:
        """What a rank computes besides K-FAC.

        Arguments:
            blocks: of a `KFAC` of the same model.
            specs: their sizes, as ``kfac.plan.blocks``.
            batch: samples of a rank.
            optimizer_bytes: bytes that the optimizer keeps for each number.
            measured: samples that the curvature is measured on, as for `Workload`.
        """
        owner = {id(p): block.name for block in blocks for p in block.parameters}
        arrivals = (Arrival(p.numel(), s, owner.get(id(p), "")) for p, s in self.arrivals)
        return Workload(
            self.parameters,
            self.forward,
            self.backward,
            sum(self._statistics(blocks, specs)),
            self.activations,
            batch,
            self.parameter_bytes,
            optimizer_bytes,
            tuple(arrivals),
            measured,
        )

    def _statistics(self, blocks: Sequence[Block], specs: Sequence[BlockSpec]) -> Iterator[float]:
        calls: dict[int, list[Call]] = {}
        for call in self.calls:
            calls.setdefault(id(call.module), []).append(call)
        counted: set[tuple[int, int]] = set()
        for block, spec in zip(blocks, specs, strict=True):
            for layer in block.layers:
                for call in calls.get(id(layer.module), ()):
                    for name, factor in spec.factors:
                        shared = block.factors[name].of_inputs
                        key = (call.source, factor.dim)
                        if shared and key in counted:
                            continue
                        if shared:
                            counted.add(key)
                        side = factor.dim if factor.diagonal else factor.dim**2
                        yield 2.0 * factor.batch * side * call.positions


def passes(model: nn.Module, sample: tuple[int, ...]) -> Passes:
    """Count a forward and a backward pass. The model must be on the meta device, without hooks.

    Arguments:
        model: whose first tensor of the output is taken for the prediction.
        sample: shape of one input: of numbers, or, for a model that takes tokens, of their indices.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained or any(not p.is_meta for p in trained):
        raise SettingError(
            f"A step of {type(model).__name__} is counted on the meta device but the model has "
            "parameters elsewhere, or none: build it under torch.device('meta')."
        )
    first: Exception | None = None
    for dtype in (trained[0].dtype, torch.int64):
        x = torch.empty(_SAMPLES, *sample, dtype=dtype, device="meta")
        try:
            return _for_each_sample(counted(model, partial(_through, model, trained, x)), trained)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            first = first or error
        finally:
            for p in trained:
                p.grad = None
    assert first is not None
    raise SettingError(
        f"A step of {type(model).__name__} on a sample {list(sample)} cannot be counted without "
        f"numbers ({first_line(first)}): pass the shape of one input, or, if shapes depend on the "
        "data, leave it out and plan K-FAC alone."
    ) from first


def _for_each_sample(found: Counted, trained: Sequence[nn.Parameter]) -> Passes:
    backward = found.backward
    return Passes(
        sum(p.numel() for p in trained),
        trained[0].element_size(),
        found.forward / _SAMPLES,
        backward / _SAMPLES,
        found.saved / _SAMPLES,
        found.calls,
        tuple((p, min(1.0, done / (backward or 1.0))) for p, done in found.arrivals),
    )


def _through(model: nn.Module, trained: Sequence[nn.Parameter], x: Tensor) -> Counted:
    for p in trained:
        p.grad = None
    counter = _Counter()  # type: ignore[no-untyped-call]
    attention, saved = _Attention(), _Saved(model)
    calls: list[Call] = []
    arrivals: list[tuple[nn.Parameter, float]] = []
    held: list[Any] = []  # inputs, so that no address is used again

    def operations() -> float:
        return counter.operations + attention.operations

    def called(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        out = next(_tensors(output), None)
        if out is not None:
            held.append(args)
            source = next(_tensors(args), out)
            calls.append(Call(module, _positions(module, out) / _SAMPLES, id(source)))

    def arrived(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        arrivals.append((p, operations()))

    own = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [module.register_forward_hook(called) for module in own]
    hooks += [p.register_post_accumulate_grad_hook(arrived) for p in trained]
    training = model.training
    try:
        model.train()
        with attention, counter:
            with saved_tensors_hooks(saved.pack, saved.unpack):
                output = next(_tensors(model(x)), None)
            if output is None or not output.requires_grad:
                raise TypeError("its output is no tensor that depends on the parameters")
            forward = operations()
            torch.autograd.backward(output, torch.empty_like(output))
            backward = operations() - forward
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    done = tuple((p, done - forward) for p, done in arrivals)
    return Counted(forward, backward, saved.bytes, tuple(calls), done)


def _positions(module: nn.Module, out: Tensor) -> float:
    """Numbers for each channel, which are in the second place of convolutions and batch norms, and
    in the last of all others."""
    weight = getattr(module, "weight", None)
    channels = out.shape[-1]
    if out.dim() > 2 and isinstance(weight, Tensor) and type(module).__name__[-1:] == "d":
        channels = out.shape[1]
    return out.numel() / channels


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that are in an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for one in value:
            yield from _tensors(one)


class _Saved:
    """Bytes of what autograd keeps, each storage once, without the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._held: list[Tensor] = []
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(tensor)
            self.bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


class _Counter(TorchDispatchMode):
    """Operations of all that torch has a formula for."""

    operations = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _Attention(TorchFunctionMode):
    """Attention as fused kernels compute it; on the meta device it would keep all scores."""

    operations = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            tensors = (named[name] for name in ("query", "key", "value"))
            return _Fused.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: _Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[..., t, d]``, ``[..., s, d]``, ``[..., s, e] -> [..., t, e]``"""
        ctx.count = count
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        ctx.product = 2.0 * query.numel() * key.shape[-2]
        count.operations += 2 * ctx.product
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.count.operations += 5 * ctx.product
        query, key, value, _ = ctx.saved_tensors
        return None, *map(torch.empty_like, (query, key, value))
