"""Functions of torch that multiply rows by experts' matrices: which rows, by which expert.

Each brings its tensors into one form, so that nothing behind it knows which function it was:

    a [b, r, in]    g [b, r, rows]    ids [b]        r rows of expert ids[k], for each k

    x @ W[k], F.linear(x, W[k])          b = 1
    bmm(x, W), einsum("nei,eoi->neo")    b experts, each with rows of its own
    einsum("ni,eoi->neo")                b experts that see the same rows
    bmm(W[idx], x[..., None])            b rows, each with an expert of its own (r = 1)
    grouped_mm(x, W, offs)               the same, with rows in the order of experts

``None`` is a function that is not known, and a sentence's end says why a use is not understood.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.expert_views import Matrices, View

Views = dict[int, View]  # of tensors that show matrices, by their ids
Arrange = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Product:
    """Rows times matrices.

    Arguments:
        a: ``[b, r, in]``.
        ids: ``[b]``, the expert of each.
        rows: which rows of the experts' matrices were multiplied by.
        arrange: the gradient of the function's result -> ``g [b, r, rows]``.
    """

    a: Tensor
    ids: Tensor
    rows: range
    arrange: Arrange

    def by_expert(self, experts: int) -> Iterator[tuple[int, Tensor, Arrange]]:
        """Each expert that sees rows: ``a [n, in]``, and what makes its ``g [n, rows]``.

        Arguments:
            experts: how many there are.
        """
        if len(self.ids) == 1:  # of a loop over experts, which would count all of them each time
            if self.a.shape[1]:
                take = _Some(0, 1, None)
                yield int(self.ids), take(self.a), _Arranged(self.arrange, take)
            return
        counts = torch.bincount(self.ids, minlength=experts).tolist()
        order: Tensor | None = None
        if bool((self.ids.diff() < 0).any()):
            order = self.ids.argsort(stable=True)
        start = 0
        for expert, count in enumerate(counts):
            end = start + count
            if count and self.a.shape[1]:
                take = _Some(start, end, order)
                yield expert, take(self.a), _Arranged(self.arrange, take)
            start = end


class _Some:
    """Those of ``[b, r, d]`` that are one expert's -> ``[n, d]``."""

    def __init__(self, start: int, end: int, order: Tensor | None) -> None:
        self.part = slice(start, end) if order is None else order[start:end]

    def __call__(self, t: Tensor) -> Tensor:
        return t[self.part].flatten(0, 1)


class _Arranged:
    """The gradient of a result -> that of one expert's rows."""

    def __init__(self, arrange: Arrange, take: _Some) -> None:
        self.arrange, self.take = arrange, take

    def __call__(self, g: Tensor) -> Tensor:
        return self.take(self.arrange(g))


class _Front:
    """Axes of experts to the front: ``[..., r, d]`` -> ``[b, r', d]``.

    Arguments:
        lead: sizes of the leading axes, to which a tensor is expanded.
        of_experts: which of these are of experts.
        swaps: whether rows are the columns of the tensor.
        is_vector: whether it has no axis of rows.
    """

    def __init__(
        self, lead: Sequence[int], of_experts: Sequence[int], *, swaps: bool, is_vector: bool
    ) -> None:
        self.lead, self.of_experts = tuple(lead), tuple(of_experts)
        self.swaps, self.is_vector = swaps, is_vector

    def __call__(self, t: Tensor) -> Tensor:
        if self.is_vector:
            t = t.unsqueeze(-2)
        elif self.swaps:
            t = t.mT
        t = t.expand(*self.lead, *t.shape[-2:])
        t = t.movedim(self.of_experts, tuple(range(len(self.of_experts))))
        b = t.shape[: len(self.of_experts)].numel()
        r = t.shape[len(self.of_experts) : -1].numel()
        return t.reshape(b, r, t.shape[-1])


def multiplied(name: str, args: Any, kwargs: Any, views: Views) -> Product | str | None:
    """The product that a function has made.

    Arguments:
        name: of the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        views: which of its tensors show matrices.
    """
    if name not in _PRODUCTS:
        return None
    if len(views) > 1:
        return "is multiplied by experts' matrices"
    if any(not view.whole for view in views.values()):
        return "is multiplied in parts of its columns"
    return _PRODUCTS[name](args, kwargs, views)


def copied(name: str, args: Any, kwargs: Any, view: View, out: Tensor) -> Matrices | None:
    """The matrices in a copy of a view; ``None`` if a function makes none, or irregular ones.

    Arguments:
        name: of the function.
        args: its positional arguments, the first of which is the view.
        kwargs: its keyword arguments.
        view: what the copied tensor shows.
        out: its result.
    """
    if name in _COPIES:
        return view.copied_to(out)
    index: Any
    if name == "__getitem__":
        index = args[1]
        if isinstance(index, tuple):
            others = [one for one in index[1:] if one is not Ellipsis and one != slice(None)]
            if others or not index:
                return None
            index = index[0]
    elif name == "index_select":
        names = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        if names["dim"] % len(view.axes) != 0:
            return None
        index = names["index"]
    else:
        return None
    if len(view.axes) != 3 or view.axes[0] not in ("e", "") or len(args[0]) != len(view.ids):
        return None
    index = torch.as_tensor(index, device=view.ids.device)
    return view.copied_to(out, view.ids[index])


def _matmul(args: Any, kwargs: Any, views: Views) -> Product | str:
    names = ("input", "other")
    first, second = _named(names, args, _renamed(kwargs, {"mat2": "other", "vec": "other"}))
    return _times(first, second, views)


def _times(first: Tensor, second: Tensor, views: Views) -> Product | str:
    """``first @ second``, one of which shows matrices."""
    left = id(first) in views
    w, x = (first, second) if left else (second, first)
    view = views.get(id(w))
    if view is None:
        return "is added to a product of others"
    turned = "".join(view.axes[-2:]) != ("oi" if left else "io")
    if turned and w.shape[-2:].numel() != 1:  # of one entry either axis is the first
        return "is multiplied along other axes than its inputs"
    is_vector = x.ndim == 1
    shape = x.shape[:-2] if x.ndim > 2 else ()
    lead = torch.broadcast_shapes(shape, w.shape[:-2])
    behind = len(lead) - (w.ndim - 2)
    of_experts = [behind + k for k, axis in enumerate(view.axes[:-2]) if axis == "e"]
    front = _Front(lead, of_experts, swaps=left, is_vector=is_vector)
    return Product(front(x.detach()), view.ids, view.rows, front)


def _linear(args: Any, kwargs: Any, views: Views) -> Product | str:
    x, w = _named(("input", "weight"), args, kwargs)
    return _transposed(x, w, views)


def _transposed(x: Tensor, w: Tensor, views: Views) -> Product | str:
    """``x @ w.mT``"""
    if id(w) not in views:
        return "is multiplied by another matrix, as an input"
    turned = w.mT
    return _times(x, turned, {id(turned): views[id(w)].transposed()})


def _added(args: Any, kwargs: Any, views: Views) -> Product | str:
    """``addmm`` and the like: ``beta input + alpha first @ second``."""
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or len(args) > 3:
        return "is multiplied with beta and alpha"
    renamed = {"mat1": "first", "mat2": "second", "batch1": "first", "batch2": "second"}
    names = ("input", "first", "second")
    _, first, second = _named(
        names, args, _renamed(kwargs, renamed | {"mat": "first", "vec": "second"})
    )
    return _times(first, second, views)


def _grouped(args: Any, kwargs: Any, views: Views) -> Product | str:
    renamed = {"self": "x", "input": "x", "mat_a": "x", "mat2": "w", "mat_b": "w", "weight": "w"}
    given = _renamed(kwargs, renamed)
    if given.get("bias") is not None or len(args) > 3:
        return "is multiplied by grouped_mm with a bias"
    x, w, offs = _named(("x", "w", "offs"), args, {"offs": None, **given})
    view = views.get(id(w))
    if view is None or x.ndim != 2 or view.axes != ("e", "i", "o") or offs is None:
        return "is multiplied by grouped_mm in another form than rows by experts"
    ends = offs.to(device=view.ids.device, dtype=torch.int64)
    counts = ends.diff(prepend=ends.new_zeros(1))
    ids = view.ids.repeat_interleave(counts)
    front = _FirstRows(len(ids))
    return Product(front(x.detach()), ids, view.rows, front)


class _FirstRows:
    """``[n, d]`` -> ``[b, 1, d]``: rows behind the last group are none of any expert."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, t: Tensor) -> Tensor:
        return t[: self.count].unsqueeze(1)


def _einsum(args: Any, kwargs: Any, views: Views) -> Product | str:
    equation, operands = args[0], args[1:]
    if not isinstance(equation, str):
        return "enters einsum() with lists of axes"
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2:
        return f"enters einsum() with {len(operands)} tensors"
    parsed = _labels(equation, operands)
    if parsed is None:
        return f"enters einsum({equation!r})"
    of_w, of_x, out = *parsed[0], parsed[1]
    w, x = operands
    if id(x) in views:
        w, x, of_w, of_x = x, w, of_x, of_w
    view = views[id(w)]
    own = dict(zip(of_w, view.axes, strict=True))
    by_axis = {axis: label for label, axis in own.items() if axis in ("o", "i")}
    if len(by_axis) < 2 or len(set(of_w)) < len(of_w):
        return f"enters einsum({equation!r})"
    o, i = by_axis["o"], by_axis["i"]
    experts = [label for label in of_w if own[label] == "e"]
    positions = [label for label in out if label != o and label not in experts]
    fits = o in out and i not in out and o not in of_x and i in of_x
    fits &= set(of_x) - set(experts) == {*positions, i}
    if not fits or len(set(of_x)) < len(of_x) or len(set(out)) < len(out):
        return f"enters einsum({equation!r})"
    sizes = dict(zip((*of_x, *of_w), (*x.shape, *w.shape), strict=True))
    sizes |= {label: n for label, n in zip(of_x, x.shape, strict=True) if n > 1}
    lead = [*experts, *positions]
    a = _Labelled(of_x, lead, i, sizes, len(experts))
    g = _Labelled(out, lead, o, sizes, len(experts))
    return Product(a(x.detach()), view.ids, view.rows, g)


class _Labelled:
    """Axes by their labels -> ``[b, r, d]``."""

    def __init__(
        self, labels: str, lead: Sequence[str], last: str, sizes: dict[str, int], experts: int
    ) -> None:
        self.order = [labels.index(label) for label in (*lead, last) if label in labels]
        self.added = [k for k, label in enumerate(lead) if label not in labels]
        self.lead, self.experts = [sizes[label] for label in lead], experts

    def __call__(self, t: Tensor) -> Tensor:
        t = t.permute(self.order)
        for k in self.added:
            t = t.unsqueeze(k)
        t = t.expand(*self.lead, t.shape[-1])
        b = t.shape[: self.experts].numel()
        r = t.shape[self.experts : -1].numel()
        return t.reshape(b, r, t.shape[-1])


def _labels(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """The axes of two operands and of the result, each a letter."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    spare = iter(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation)
    dots = [n.ndim - len(s.replace("...", "")) for s, n in zip(inputs, operands, strict=True)]
    dots = [count if "..." in s else 0 for s, count in zip(inputs, dots, strict=True)]
    if min(dots) > 0:
        return None
    letters = "".join(next(spare) for _ in range(max(dots)))
    inputs = [
        s.replace("...", letters if count else "") for s, count in zip(inputs, dots, strict=True)
    ]
    if not arrow:
        every = "".join(inputs)
        out = letters + "".join(sorted(c for c in set(every) - set(letters) if every.count(c) == 1))
    out = out.replace("...", letters)
    if any(len(s) != n.ndim for s, n in zip(inputs, operands, strict=True)):
        return None
    return inputs, out


def _named(names: Sequence[str], args: Any, kwargs: Any) -> list[Any]:
    """Arguments in the order of their names."""
    return [args[k] if k < len(args) else kwargs[name] for k, name in enumerate(names)]


def _renamed(kwargs: Any, names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in kwargs.items()}


_COPIES = {"to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone", "type_as"}
_PRODUCTS: dict[str, Callable[[Any, Any, Views], Product | str]] = {
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm", "mv"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added),
    **dict.fromkeys(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"), _grouped),
    "linear": _linear,
    "einsum": _einsum,
}
