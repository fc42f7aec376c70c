"""Forward passes, and how many samples there are in them.

Samples are counted at the model, not at its layers: a layer may be called twice, or see windows or
tokens as its batch. What the model is called with says how many there are, by the leading size of
its first tensor. Where several sizes were given, the layers show whether the first one was right.

A sample may come without an axis of its own: then the layers are called so, too, all of them. What
layers have shown is kept for the steps on which nobody looks at them.

Where parts of a model are called and never the model itself, the largest batch that a layer saw has
to do. A pass then begins when a part is called after a gradient has come back to the pass before.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.utils.rnn import PackedSequence

from natgrad.capture.blocks import Block
from natgrad.capture.module_hooks import in_backward
from natgrad.capture.output_hooks import Reading
from natgrad.layers import Layer
from natgrad.layers.experts import Expert

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture

ALONE = -1  # the place of a sample without an axis
CROSSED = (
    "The model was called in one thread while another one was inside of it, so that KFAC cannot "
    "tell whose samples are whose: let the threads wait for each other, or give each a model of "
    "its own."
)


class Pass:
    """One forward pass of the model, and which gradients of it have arrived.

    ``sizes``: what may be the number of samples, the most likely first; none if the model itself
    was not called. ``listed``: the first is the length of a list. ``again``: the whole model is
    computed again, in a backward pass. ``place``: which of them it was before, or `ALONE`."""

    def __init__(
        self,
        sizes: Sequence[int] = (),
        *,
        listed: bool = False,
        again: bool = False,
        place: int = 0,
    ) -> None:
        self.sizes, self.listed, self.again = tuple(sizes), listed, again
        self.thread = get_ident()
        self.place = place if place < len(self.sizes) else 0
        self.samples: int | None = None
        if self.sizes:
            self.samples = 1 if self.place == ALONE else self.sizes[self.place]
        self.alone = 0  # calls of layers with one sample that has no axis
        self.lonely: dict[Block, str] = {}  # names of layers of sequences that saw one sample
        self.seen: Counter[int] = Counter()  # sizes of the batches that layers saw
        self.rows = 0  # the largest of those that a gradient came back to
        self.returned = False
        self.weights: Reading | None = None  # of the loss's terms, if they were read
        self.weight: Tensor | None = None  # of residuals in the loss
        self.drawn = 0.0  # terms that a Fisher has sent vectors back from
        self.doubt = ""
        self.calls: Counter[Block] = Counter()
        self.hooked: Counter[Block] = Counter()
        self.recomputed: Counter[Block] = Counter()  # those of them inside of the backward pass
        self.added: Counter[Block] = Counter()
        self.arrived: Counter[tuple[Block, int]] = Counter()
        self.pending: dict[tuple[Block, str, int], list[tuple[Tensor, ...]]] = {}
        self.tape: list[tuple[Any, Any, GradientEdge, Any]] = []
        self.chosen: Tensor | None = None  # numbers of the samples that enter; None: all
        self.share = 1.0  # of the samples
        self._rows: dict[int, Tensor | None] = {}

    @classmethod
    def of(cls, given: tuple[Any, ...], axis: int, again: bool, place: int) -> "Pass":
        """That of a model which is called with these."""
        listed = bool(given) and isinstance(given[0], list)
        return cls(sample_counts(given, axis), listed=listed, again=again, place=place)

    @property
    def is_alone(self) -> bool:
        """Whether it is of one sample that has no axis."""
        return self.place == ALONE

    def choose(self, chosen: Tensor) -> None:
        """Only these samples enter the statistics."""
        assert self.samples
        self.chosen, self.share = chosen, len(chosen) / self.samples
        self._chosen_of = self.samples  # layers may show later that these were no samples

    def chosen_rows(self, count: int) -> Tensor | None:
        """Which of ``count`` rows are of the chosen samples; ``None`` if that cannot be told."""
        if count not in self._rows:
            self._rows[count] = self._rows_of(count)
        return self._rows[count]

    def _rows_of(self, count: int) -> Tensor | None:
        if self.chosen is None or count % self._chosen_of:
            return None
        each = count // self._chosen_of
        if each == 1:
            return self.chosen
        within = torch.arange(each, device=self.chosen.device)
        return (self.chosen.unsqueeze(1) * each + within).flatten()

    def widen(self, layer: Layer[Any], rows: int) -> None:
        """A gradient has come back to so many rows of a layer."""
        if not isinstance(layer, Expert):  # of which each sees some rows of all samples
            self.rows = max(self.rows, rows)

    def fits(self, rows: int) -> bool:
        """Whether a part that was called with so many rows, outside of the model, belongs to this
        pass."""
        return not self.returned and (not self.samples or rows % self.samples == 0)

    def count(self, block: Block, rows: int, *, alone: bool) -> None:
        """A layer was called on so many rows (0: they say nothing of samples), or on one sample
        that has no axis."""
        self.calls[block] += 1
        self.alone += alone
        if rows and block.region_terms is None:
            self.seen[rows] += 1

    def settle(self) -> None:
        """All layers have been called: see if they bear out the number of samples."""
        if self.samples is None:
            self._settle_parts()
            return
        if self.place == ALONE and self.alone < self.calls.total():
            self.place, self.samples = 0, self.sizes[0]
        if self.samples > 1 and self.alone and self.alone == self.calls.total():
            if all(calls % self.samples for calls in self.calls.values()):  # no loop over samples
                self.place, self.samples = ALONE, 1
            return
        lonely = [name for block, name in self.lonely.items() if self.calls[block] < self.samples]
        if lonely:
            self.doubt = (
                f"The model was called with {self.samples} samples, but {lonely[0]} with one: "
                "where the model takes a sample without an axis, give it one, as in x[None]."
            )
        others = [n for n in self.sizes if n > 1 and n != self.samples and n in self.seen]
        seen = [n for n in others if all(rows % n == 0 for rows in self.seen)]
        if self.samples in self.seen or not seen:
            return
        first, other = self.samples, seen[0]
        if first == 1 or self.listed:  # a time step, or two inputs: no layer saw a batch like that
            self.place, self.samples = self.sizes.index(other), other
        self.doubt = (
            f"The model was called with sizes {first} and {other}. The first is taken for the "
            f"number of samples, but all layers saw {other}, so KFAC counts {self.samples}: pass "
            "the tensor with the samples first, or step(samples=...)."
        )

    def _settle_parts(self) -> None:
        several = any(calls > 1 for calls in self.calls.values())
        if len(self.seen) > 1 or several:
            what = "a layer was called several times" if several else "layers saw several sizes"
            self.doubt = (
                f"Parts of the model were called and not the model itself, and {what} "
                f"({', '.join(map(str, sorted(self.seen)))}), so that KFAC takes the largest for "
                "the number of samples: call the model, or pass step(samples=...)."
            )


class Threads:
    """Whether two threads are inside of the model at once. ``left``: those that were when another
    one came; ``crossed``: why the step is refused."""

    def __init__(self) -> None:
        self.left: set[int] = set()
        self.crossed = ""

    def begin(self, capture: "Capture") -> bool:
        """This thread calls the model; True."""
        me, before = get_ident(), capture.current
        self.left.discard(me)  # it has come out before, by an exception
        if capture.inside and before is not None and before.thread != me:
            self.left.add(before.thread)
        return True

    def end(self, capture: "Capture") -> bool:
        """This thread comes out of the model; False."""
        me, this = get_ident(), capture.current
        other = this is not None and this.thread != me
        if (other or me in self.left) and not in_backward():
            self.crossed = CROSSED
        return False


def entering_share(passes: Sequence[Pass]) -> float:
    """Of the samples of all passes, those that enter the statistics."""
    counts = [p.rows if p.samples is None else p.samples for p in passes]
    entering = sum(p.share * count for p, count in zip(passes, counts, strict=True))
    return entering / sum(counts) if any(counts) else 1.0


def sample_counts(values: tuple[Any, ...], axis: int) -> list[int]:
    """What may be the number of samples in what a model was called with: the leading sizes of its
    tensors, and the lengths of lists (of images of different sizes), in their order."""
    found: dict[int, None] = {}
    for value in values:
        if isinstance(value, PackedSequence):
            found[int(value.batch_sizes[0])] = None
            continue
        if isinstance(value, list):
            found[len(value)] = None
        for tensor in tensors_of(value):
            if tensor.ndim > axis:
                found[tensor.shape[axis]] = None
    return list(found)


def leading_size(values: tuple[Any, ...], axis: int) -> int | None:
    """The most likely one of them."""
    return next(iter(sample_counts(values, axis)), None)


def prediction(out: Any) -> Tensor | None:
    """What the loss is computed from: the output itself, its ``logits``, or its first tensor that
    has a gradient.

    Arguments:
        out: what a model has returned.
    """
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    found = tensors_of(getattr(out, "logits", out))
    return next((t for t in found if t.requires_grad and t.ndim), None)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
