"""Stand-ins of bare parameters: tensors that see every function they enter, until samples come in.

A `StandIn` is the parameter, or what was computed of parameters alone. Where it meets a tensor that
carries samples it is expanded over them before the function is called: a view, so that no number of
the result changes, and the gradient of the expanded tensor is that of each sample. The result is a
plain tensor again. `natgrad.capture.bare_uses` says which tensors carry samples, and takes those
gradients.

Some tensors cannot be told: a mask needs no gradient, nor do features of a frozen network, and
``cls.expand(n, -1, -1)`` has samples only if ``n`` counts them. There the expansion is a `Point`
that waits beside the stand-in for as long as rows stay rows. It is taken when its rows turn out to
be those of samples, and forgotten where they do not: what follows then is expanded anew, behind.

Nothing is guessed of a function that is not listed below: with samples in it the use is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.passes import tensors_of
from natgrad.capture.points import Point, Root

# Functions whose tensors are broadcast to one shape, entry by entry.
_PAIRS = ("add", "sub", "mul", "truediv", "pow")
_ELEMENTWISE = {
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow"),
    *("where", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
    *(f"__{side}{name}__" for name in _PAIRS for side in ("", "r")),
    *("add_", "sub_", "mul_", "div_", *(f"__i{name}__" for name in _PAIRS)),
}
_JOINING = {"cat", "concat", "concatenate"}
_BATCHED = {"matmul", "bmm", "__matmul__", "__rmatmul__"}
_EXPANDING = {"expand", "expand_as", "broadcast_to", "repeat"}
# What keeps rows rows, if there are as many behind it.
_BY_ROWS = {
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "contiguous", "clone", "alias"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "dropout", "linear"),
    *("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "neg", "softplus", "__neg__"),
}
# What picks entries, or orders them in another way.
_PICKING = {
    *("__getitem__", "__get__", "select", "narrow", "chunk", "split", "unbind", "index_select"),
    *("transpose", "swapaxes", "permute", "movedim", "squeeze", "t", "view_as", "reshape_as"),
}
Function = Callable[..., Any]


class StandIn(Tensor):
    """``points``: its leading axis may be that of samples, which came in there."""

    roots: tuple[Root, ...]
    points: tuple[Point, ...]

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _Entered(func, args, kwargs or {})()


def stand_in(t: Tensor, roots: Iterable[Root], points: Iterable[Point] = ()) -> StandIn:
    """A stand-in for a plain tensor that these parameters are behind."""
    made = t.as_subclass(StandIn)
    made.roots, made.points = tuple(roots), tuple(points)
    return made


class _Entered:
    """A function that a stand-in enters. Called, it gives what the function gives."""

    def __init__(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = getattr(func, "__name__", str(func))
        given = list(tensors_of((args, kwargs)))
        self.mine = list({id(t): t for t in given if isinstance(t, StandIn)}.values())
        self.others = [t for t in given if not isinstance(t, StandIn)]
        self.roots = tuple({root: None for t in self.mine for root in t.roots})
        self.call = self.roots[0].call

    def __call__(self) -> Any:
        if not torch.is_grad_enabled() or not all(root.call.alive for root in self.roots):
            return self._run({})
        if self.name == "__setitem__":
            return self._refused("is written into another tensor")
        if self.name == "__set__" or (self._in_place and isinstance(self.args[0], StandIn)):
            return self._refused("is overwritten")
        if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in self.others):
            return self._refused("is used inside of a transform of torch.func")
        if any(root.call.is_elsewhere for root in self.roots):
            return self._refused("is used in a part of it that is checkpointed")
        data = [t for t in self.others if self.call.carries(t)]
        if self.name in _EXPANDING:
            return self._expanded()
        if self.name in _ELEMENTWISE:
            shape = torch.broadcast_shapes(*(t.shape for t in (*self.mine, *self.others)))
            return self._broadcast(data, self.mine, shape)
        if self.name == "scaled_dot_product_attention" and data:
            return self._attention(data)
        if self.name in _JOINING:
            return self._joined(data)
        if data and self.name == "__getitem__" and self.args[1] is data[0]:
            return self._looked_up(data[0])
        if data:
            return self._beside(data)
        out = self._run({})
        points = {point: None for t in self.mine for point in t.points}
        if not points or self._keeps_rows(out):
            return self._followed(out, points)
        if self.name not in _PICKING and any(point.numbers for point in points):
            return self._taken(out, points)  # what enters a layer, or is summed up, is no mask
        return self._followed(out, ())

    # What comes out.

    def _run(self, instead: dict[int, Tensor]) -> Any:
        if not instead:
            return self.func(*self.args, **self.kwargs)
        return self.func(*_put(self.args, instead), **_put(self.kwargs, instead))

    def _followed(self, out: Any, points: Iterable[Point]) -> Any:
        if isinstance(out, tuple | list) and not hasattr(out, "_fields"):
            return type(out)(self._followed(t, points) for t in out)
        if isinstance(out, Tensor) and out.requires_grad and not isinstance(out, StandIn):
            return stand_in(out, self.roots, points)
        return out

    def _taken(self, out: Any, points: Iterable[Point]) -> Any:
        for point in points:
            point.take()
        return out

    def _refused(self, why: str) -> Any:
        for root in self.roots:
            root.call.refuse(root, why)
        return self._run({})

    @property
    def _in_place(self) -> bool:
        one, two = self.name.endswith("_"), self.name.endswith("__")
        return (one and not two) or (
            two and self.name.startswith("__i") and self.name != "__iter__"
        )

    # Functions.

    def _expanded(self) -> Any:
        """Of ``expand`` and ``repeat``: new rows may be samples."""
        source, sizes = self.args[0], self._sizes()
        if not isinstance(source, StandIn) or sizes is None:
            return self._refused(f"enters {self.name}()")
        new = len(sizes) > source.ndim or (source.ndim > 0 and source.shape[0] == 1)
        if not new or not sizes:
            kept = len(sizes) == source.ndim and (self.name != "repeat" or sizes[0] == 1)
            return self._followed(self._run({}), source.points if kept else ())
        if self.name == "repeat":
            one, rows = source.repeat(1, *sizes[1:]), sizes[0]
        else:
            one, rows = source.expand(1, *sizes[1:]), sizes[0]
            rows = source.shape[0] if rows == -1 else rows
        many = one.expand(rows, *one.shape[1:])
        out = many.clone() if self.name == "repeat" else many
        if rows % self.call.samples:
            return self._followed(out, ())
        return self._followed(out, [Point(one, many, 0, self.roots)])

    def _sizes(self) -> list[int] | None:
        rest: Sequence[Any] = [*self.args[1:], *self.kwargs.values()]
        if self.name == "expand_as" and rest:
            return list(rest[0].shape)
        if len(rest) == 1 and isinstance(rest[0], tuple | list):
            rest = rest[0]
        return [int(n) for n in rest] if all(isinstance(n, int) for n in rest) else None

    def _broadcast(self, data: list[Tensor], mine: list[StandIn], shape: Sequence[int]) -> Any:
        """Of a function whose tensors are broadcast to one shape; ``mine``: those that are."""
        carrier = max(data, key=lambda t: t.ndim) if data else self._may_carry(mine)
        if carrier is None:
            return self._followed(self._run({}), ())
        axis = len(shape) - carrier.ndim + (self.call.axis if data else 0)
        own = axis - (len(shape) - carrier.ndim)
        fits = own < carrier.ndim and carrier.shape[own] == shape[axis]
        if not fits or shape[axis] % self.call.samples or not (data or axis == 0):
            if not data:
                return self._followed(self._run({}), ())
            return self._refused(_ROWS.format(list(carrier.shape), self.call.samples))
        instead: dict[int, Tensor] = {}
        points: dict[Point, None] = {}
        for t in mine:
            at = axis - (len(shape) - t.ndim)
            if at < 0 or t.shape[at] == 1:
                point = _expanded(t, shape, axis, numbers=not data)
                instead[id(t)] = point.expanded
                points[point] = None
            elif at == 0 and t.points:
                points |= dict.fromkeys(t.points)
            elif data:
                return self._refused("has entries of its own for samples")
        out = self._run(instead)
        if data:
            return self._taken(out, points)
        for point in points:
            point.numbers = point.numbers or not isinstance(carrier, StandIn)
        return self._followed(out, points)

    def _may_carry(self, mine: list[StandIn]) -> Tensor | None:
        """A tensor whose rows may be those of samples."""
        for t in mine:
            if t.points:
                return t
        samples = self.call.samples
        found = (t for t in self.others if t.ndim and not t.requires_grad)
        return next((t for t in found if t.shape[0] % samples == 0), None)

    def _attention(self, data: list[Tensor]) -> Any:
        """The mask that is added to scores."""
        names = ("query", "key", "value", "attn_mask")
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        mask = given.get("attn_mask")
        if len(self.mine) > 1 or self.mine[0] is not mask:
            return self._beside(data)
        query, key = given["query"], given["key"]
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        return self._broadcast([query], [mask], (*lead, query.shape[-2], key.shape[-2]))

    def _joined(self, data: list[Tensor]) -> Any:
        """Of ``cat``: parts with rows for all samples."""
        where: Any = self.kwargs.get("dim", self.kwargs.get("axis", self.args[1:2] or 0))
        where = where[0] if isinstance(where, tuple) else where
        out = self._run({})
        points = {point: None for t in self.mine for point in t.points}
        if not data:
            rest = [t for t in self.others if not t.requires_grad and t.ndim]
            whole = all(t.points for t in self.mine) and where % out.ndim != 0
            for point in points:
                point.numbers = point.numbers or bool(rest)
            return self._followed(out, points if whole else ())
        rows = data[0].shape[0] if data[0].ndim else 0
        if self.call.axis or where % out.ndim == 0 or rows % self.call.samples:
            return self._refused("is joined with samples along their own axis")
        instead: dict[int, Tensor] = {}
        for t in self.mine:
            if not t.points and rows == 1:  # a batch of one: nobody has to expand anything
                point = _expanded(t, t.shape, 0, numbers=False)
                instead[id(t)], points[point] = point.expanded, None
            elif not t.points or t.shape[0] != rows:
                return self._refused("is joined with samples")
        return self._taken(self._run(instead) if instead else out, points)

    def _looked_up(self, rows: Tensor) -> Any:
        """Of ``q[rows]`` with rows ``[n, …]`` that each sample has for itself."""
        n, q = rows.shape[0], self.args[0]
        whole = not rows.is_floating_point() and rows.dtype != torch.bool
        if self.call.axis or not whole or not isinstance(q, StandIn) or n % self.call.samples:
            return self._refused("is looked up in a way that is not known")
        point = _expanded(q, (n, *q.shape), 0, numbers=False)
        each = torch.arange(n, device=rows.device).view(-1, *[1] * (rows.ndim - 1))
        return self._taken(point.expanded[each, rows], [point])

    def _beside(self, data: list[Tensor]) -> Any:
        """Any other function with samples in it: products of batches of matrices are known."""
        for t in self.mine:
            alike = t.ndim == data[0].ndim >= 3 and t.shape[0] == data[0].shape[0]
            known = self.name in _BATCHED or self.name == "scaled_dot_product_attention"
            if self.call.axis or not (known and alike and t.points):
                return self._refused(f"enters {self.name}()")
        return self._taken(self._run({}), {p: None for t in self.mine for p in t.points})

    def _keeps_rows(self, out: Any) -> bool:
        if not isinstance(out, Tensor) or len(self.mine) > 1 or not out.ndim:
            return False
        (t,) = self.mine
        if self.name in ("transpose", "swapaxes"):
            return 0 not in (int(d) % t.ndim for d in (*self.args[1:], *self.kwargs.values()))
        if self.name == "permute":
            order = self._sizes()
            return bool(order and order[0] % t.ndim == 0)
        if self.name == "__getitem__":
            index = self.args[1]
            return isinstance(index, tuple) and index[:1] == (slice(None),)
        return self.name in _BY_ROWS and t.ndim > 1 and out.shape[0] == t.shape[0]


_ROWS = "meets a tensor of shape {}, in which {} samples are not found"


def _expanded(t: StandIn, shape: Sequence[int], axis: int, *, numbers: bool) -> Point:
    """``t`` as one of the tensors that are broadcast to ``shape``, expanded along one axis."""
    padded = t.as_subclass(Tensor)
    padded = padded[(None,) * (len(shape) - t.ndim)] if len(shape) > t.ndim else padded
    sizes = [shape[i] if i == axis else n for i, n in enumerate(padded.shape)]
    return Point(padded, padded.expand(sizes), axis, t.roots, numbers)


def _put(value: Any, instead: dict[int, Tensor]) -> Any:
    """The same with other tensors in the place of some."""
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if isinstance(value, dict):
        return {key: _put(item, instead) for key, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_put(item, instead) for item in value)
    return value
