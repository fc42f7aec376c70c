"""Whether the uses of a parameter that were seen make up its gradient.

Parameters that are used in expressions, and stacks of experts, are seen where functions of torch
take them. What no function shows (another reference to the parameter, a kernel of its own) would be
missing in the statistics without a word. So the gradients of the uses and that of the parameter are
both added up while backward passes run, and compared at the step: as tensors, so that no
accelerator has to wait. Of a stack, which may be most of a model, only products with fixed
random signs are added up, a number for each expert, which a use that is missing would change.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from natgrad.capture.blocks import Block
from natgrad.capture.output_hooks import observed

if TYPE_CHECKING:
    from natgrad.capture.bare_uses import PullBack
    from natgrad.capture.hooks import Capture

_NOT_BROADCAST = "not all of its uses are seen where it is broadcast over samples"
_NOT_MULTIPLIED = (
    "not all of its uses are seen where the experts' matrices are multiplied by rows, or a bias is "
    "not added to all rows of its expert"
)
Find = Callable[[], "StackEntry"]


class Account:
    """Of one preconditioner. ``entries`` of bare parameters, ``stacks`` of those with experts."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.entries: dict[Block, _Entry] = {}
        self.stacks: dict[int, StackEntry] = {}
        self._watched: dict[int, Tensor] = {}  # stacks with a hook; held, as ids are used again

    def __deepcopy__(self, memo: Any) -> "Account":
        return Account()  # copied parameters have no hooks

    def clear(self) -> None:
        """A new step."""
        self.entries, self.stacks = {}, {}

    def open(self, capture: "Capture", blocks: Iterable[Block]) -> None:
        """Watch the gradients of their parameters."""
        self.close()
        for block in dict.fromkeys(blocks):
            (parameter,) = block.parameters
            if parameter.requires_grad:
                self.handles.append(parameter.register_hook(_Total(self, capture, block)))

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self._watched = [], {}

    def of(self, block: Block) -> "_Entry":
        return self.entries.setdefault(block, _Entry())

    def refuse(self, block: Block, why: str) -> None:
        self.of(block).refused = True
        block.refusals.add(why)

    def leave_out(self, block: Block) -> None:
        """Some of its uses are none of the statistics', so its gradient is more than theirs."""
        self.of(block).partial = True

    def stack(self, parameter: Tensor, blocks: Sequence[Block], *, rows_axis: int) -> "StackEntry":
        """That of a parameter with a matrix, or a bias, of each expert."""
        if id(parameter) not in self.stacks:
            self.stacks[id(parameter)] = StackEntry(parameter, blocks, rows_axis)
        return self.stacks[id(parameter)]

    def watch_stack(self, capture: "Capture", current: Tensor, find: Find) -> None:
        """Have the gradients of a stack; ``current`` is what its module computes with, ``find``
        gives the entry of this step."""
        if id(current) not in self._watched and current.requires_grad and current.is_leaf:
            self._watched[id(current)] = current
            self.handles.append(current.register_hook(_StackTotal(capture, find)))

    def settle(self) -> dict[Block, Tensor]:
        """The step is over: whether uses of these blocks were not understood, ``[]`` of bools; they
        remember it."""
        found = {block: entry.short() for block, entry in self.entries.items()}
        for block, short in found.items():
            block.refusals.fall_short(short, _NOT_BROADCAST)
        by_stack: dict[Block, Tensor] = {}  # of weight and bias together
        for stack in self.stacks.values():
            short = stack.short()
            for block in stack.blocks:
                by_stack[block] = by_stack[block] | short if block in by_stack else short
        for block, short in by_stack.items():
            block.refusals.fall_short(short, _NOT_MULTIPLIED)
        return found | by_stack


class _Entry:
    """Sums over a step. ``seen [numel]`` of the uses, ``total [numel]`` of the parameter; ``size``:
    norms of what was added, as rounding errors grow with them. ``refused``: a use was not
    understood; ``partial``: one was left out."""

    def __init__(self) -> None:
        self.refused = self.partial = False
        self.seen: Tensor | None = None
        self.total: Tensor | None = None
        self.size: Tensor | None = None

    def add_total(self, g: Tensor) -> None:
        g = g.flatten().to(_wide(g), copy=True)  # DDP averages the gradient itself in place
        self.total = g if self.total is None else self.total + g

    def add_seen(self, g: Tensor, pull: "PullBack") -> None:
        own = pull.total(g)
        own = own.to(_wide(own))
        # Norms of all samples add up to this at most; g itself is as exact as its numbers are.
        rounding = max(_CLOSE, _ROUNDINGS * torch.finfo(g.dtype).eps)
        size = rounding * g.norm().to(own.dtype) * g.shape[pull.axis] ** 0.5
        self.seen = own if self.seen is None else self.seen + own
        self.size = size if self.size is None else self.size + size

    def short(self) -> Tensor:
        if self.total is None or self.partial or self.refused:
            return torch.tensor(self.refused)
        if self.seen is None or self.size is None:
            return self.total.any()
        apart: Tensor = (self.seen - self.total).norm() > self.size
        return apart


_CLOSE, _ROUNDINGS = 1e-4, 16.0


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


class _Total:
    """The hook on a parameter."""

    def __init__(self, account: Account, capture: "Capture", block: Block) -> None:
        self.account, self.capture, self.block = account, capture, block

    def __call__(self, g: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and self.capture.root not in observed:
            self.account.of(self.block).add_total(g.detach())
        # Of a batch of one, several parameters may have one tensor, which would be stepped twice.
        return g.clone()


class StackEntry:
    """Sums over a step of ``u^T M v`` for the gradient M of each expert's matrix, or ``u^T m`` of
    its bias, with the same signs ``u [out]`` and ``v [in]`` for all. ``seen [E]`` of the rows that
    were seen, ``total [E]`` of the parameter, ``size [E]``: what rounding errors grow with."""

    def __init__(self, parameter: Tensor, blocks: Sequence[Block], rows_axis: int) -> None:
        self.blocks, self.rows_axis = list(blocks), rows_axis
        self.refused = self.partial = False
        self.shape = parameter.shape
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.seen, self.total, self.size = (
            torch.zeros(self.shape[0], dtype=dtype, device=parameter.device) for _ in range(3)
        )

    def refuse(self, why: str) -> None:
        """A use was not understood."""
        self.refused = True
        for block in self.blocks:
            block.refusals.add(why)

    def leave_out(self) -> None:
        """A use was none of the statistics'."""
        self.partial = True

    def add_total(self, g: Tensor) -> None:
        m = g.to(self.total.dtype)
        if m.ndim == 3:
            m = m.movedim(self.rows_axis, 1)
            m = m @ signs(m.shape[2], 1, m.dtype, m.device)
        self.total += m @ signs(m.shape[1], 0, m.dtype, m.device)

    def add_seen(self, ids: Tensor, rows: range, g: Tensor, a: Tensor | None) -> None:
        """``ids [b]``: of the experts of ``g [b, r, rows]``, gradients of these rows of outputs,
        and of ``a [b, r, in]``, their inputs; ``None``: those of a bias, 1."""
        rounding = max(_CLOSE, _ROUNDINGS * torch.finfo(g.dtype).eps)
        dtype, device = self.seen.dtype, self.seen.device
        g = g.to(dtype)
        out = self.shape[self.rows_axis]
        u = signs(out, 0, dtype, device)[rows.start : rows.stop : rows.step]
        own, size = g @ u, g.norm(dim=2)
        if a is not None:
            a = a.to(dtype)
            own, size = own * (a @ signs(a.shape[2], 1, dtype, device)), size * a.norm(dim=2)
        self.seen.index_add_(0, ids, own.sum(1))
        self.size.index_add_(0, ids, rounding * size.sum(1))

    def short(self) -> Tensor:
        if self.partial or self.refused:
            return torch.tensor(self.refused)
        return ((self.seen - self.total).abs() > self.size).any()


@lru_cache(maxsize=64)
def signs(size: int, which: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same random signs ``[size]`` at every call, others for each ``which``."""
    generator = torch.Generator().manual_seed(2 * size + which)
    found = torch.randint(2, (size,), generator=generator).mul_(2).sub_(1)
    return found.to(dtype=dtype, device=device)


class _StackTotal:
    """The hook on a parameter with experts."""

    def __init__(self, capture: "Capture", find: Find) -> None:
        self.capture, self.find = capture, find

    def __call__(self, g: Tensor) -> None:
        if not torch.is_grad_enabled() and self.capture.root not in observed:
            self.find().add_total(g.detach())
