"""Recurrent modules: linear projections inside fused functions that no module hook sees.

On steps that take statistics a fused call is replaced by the same computation from its parts:

``z_t = (W_ih x_t + b_ih) + (W_hh h_{t-1} + b_hh)``,  ``h_t = cell(z_t, h_{t-1})``

for every layer and direction. All ``W_ih x_t`` are one product, and its gradient is that of every
``z_t``, hence also that of the hidden projections (of the new gate of a GRU, times the reset gate):
one hook a layer and direction serves both matrices, however long the sequence. Results are those of
the fused function up to rounding; dropout between layers is drawn from the same generator, but the
mask need not be the one that a fused kernel would have drawn.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from natgrad.layers.axes import per_sample
from natgrad.layers.functional import Projection, Seen, Watch
from natgrad.layers.recurrence import CELLS, SEQUENCES, State, Step, Weights, by_cell, run
from natgrad.layers.registry import register
from natgrad.linalg.forms import Form

Recurrent = nn.RNN | nn.LSTM | nn.GRU
Cell = nn.RNNCell | nn.LSTMCell | nn.GRUCell


class RecurrentProjection(Projection[nn.Module]):
    """One matrix of a recurrent module.

    Arguments:
        name: of the module in the model; that of the layer is ``name.ih_l0`` and so on.
        module: the recurrent module.
        cell: number of the layer and direction, in the order of the module's weights.
        role: ``"ih"`` of the inputs, ``"hh"`` of the hidden state, ``"hr"`` from the hidden state
            to an LSTM's ``proj_size``.
        suffix: of the parameter's name, such as ``"_l0_reverse"``.
    """

    def __init__(self, name: str, module: nn.Module, cell: int, role: str, suffix: str) -> None:
        weight = getattr(module, f"weight_{role}{suffix}")
        bias = getattr(module, f"bias_{role}{suffix}", None)
        own = f"{role}{suffix}"
        super().__init__(f"{name}.{own}" if name else own, module, weight, bias)
        self.cell, self.role = cell, role

    @classmethod
    def watch(cls, layers: Sequence[Any], seen: Seen, inputs: tuple[Any, ...]) -> Watch[Any]:
        return RecurrentWatch(layers, seen, inputs)

    def inputs(self, x: "Tensor | Packed") -> Tensor:
        return x.padded if isinstance(x, Packed) else x

    def some(self, x: "Tensor | Packed", rows: Tensor) -> Any:
        return PackedSome(x, rows) if isinstance(x, Packed) else super().some(x, rows)

    # Positions after the end of a sequence have no gradient, so they only matter where inputs are
    # averaged by themselves.

    def add_inputs(self, x: "Tensor | Packed", form: Form, kept: Tensor) -> int:
        return super().add_inputs(x.rows[None] if isinstance(x, Packed) else x, form, kept)

    def position_sums(
        self, x: "Tensor | Packed", g: Tensor, samples: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int | Tensor]:
        a, gs, positions = super().position_sums(x, g, samples, dtype)
        if not isinstance(x, Packed):
            return a, gs, positions
        lengths = per_sample(x.real[None].to(dtype), samples).sum(2)
        if self.bias is not None:
            a[..., -1:] = lengths
        return a, gs, lengths


@register(nn.RNN, nn.LSTM, nn.GRU)
def of_sequences(name: str, module: Recurrent) -> list[RecurrentProjection]:
    """``ih_l0``, ``hh_l0``, ``ih_l0_reverse``, ...: two layers for each layer and direction, three
    with ``proj_size``; both biases come with their weights.

    Arguments:
        name: of the module in the model.
        module: an RNN, LSTM or GRU.
    """
    directions = ("", "_reverse") if module.bidirectional else ("",)
    suffixes = [f"_l{i}{way}" for i in range(module.num_layers) for way in directions]
    roles = ("ih", "hh", "hr") if module.proj_size else ("ih", "hh")
    return _trained(
        RecurrentProjection(name, module, cell, role, suffix)
        for cell, suffix in enumerate(suffixes)
        for role in roles
    )


@register(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
def of_one_step(name: str, module: Cell) -> list[RecurrentProjection]:
    """``ih`` and ``hh`` of a cell, a layer each.

    Arguments:
        name: of the module in the model.
        module: an RNNCell, LSTMCell or GRUCell.
    """
    return _trained(RecurrentProjection(name, module, 0, role, "") for role in ("ih", "hh"))


def _trained(layers: Iterable[RecurrentProjection]) -> list[RecurrentProjection]:
    return [layer for layer in layers if layer.parameters]


class Steps(NamedTuple):
    """How rows ``[b_0 + b_1 + ..., d]`` lie, one time step after the other; a packed sequence has
    its longest samples first, and ``order`` brings them back to where they were.

    Arguments:
        sizes: ``b_t``, samples of each time step.
        batch_sizes: the same as a tensor, of a packed sequence; ``None`` for one that is not
            packed.
        order: where the samples of a packed sequence were before they were sorted by length;
            ``None`` if they are in their order.
    """

    sizes: list[int]
    batch_sizes: Tensor | None = None
    order: Tensor | None = None

    def samples_first(self, rows: Tensor) -> Tensor:
        """``[n, steps, d]``, with zeros after the end of a sample.

        Arguments:
            rows: ``[b_0 + b_1 + …, d]``, one time step after the other.
        """
        if self.batch_sizes is None:
            return rows.reshape(len(self.sizes), -1, rows.shape[-1]).transpose(0, 1)
        packed = PackedSequence(rows, self.batch_sizes, None, self.order)
        return pad_packed_sequence(packed, batch_first=True)[0]

    def keep(self, rows: Tensor) -> "Tensor | Packed":
        """What a layer needs of its inputs: padded, or with the lengths of samples where they
        differ.

        Arguments:
            rows: ``[b_0 + b_1 + …, d]``, one time step after the other; detached.
        """
        rows = rows.detach()
        return self.samples_first(rows) if self.batch_sizes is None else Packed(rows, self)


class Packed:
    """Inputs of samples of different lengths.

    Arguments:
        rows: ``[b_0 + b_1 + …, d]``, one time step after the other.
        steps: how they lie.
    """

    def __init__(self, rows: Tensor, steps: Steps) -> None:
        self.rows, self.steps = rows, steps

    @cached_property
    def padded(self) -> Tensor:
        return self.steps.samples_first(self.rows)

    @property
    def count(self) -> int:
        """Of samples."""
        return self.steps.sizes[0]

    @property
    def real(self) -> Tensor:
        """``[n, steps, 1]``: 1 up to the end of a sample, then 0."""
        return self.steps.samples_first(self.rows.new_ones(len(self.rows), 1))

    def __getitem__(self, samples: slice) -> Tensor:
        return self.padded[samples]


class PackedSome(Packed):
    """Some samples of packed inputs, padded to the longest of all.

    Arguments:
        whole: the inputs of all samples.
        samples: numbers of those that are left.
    """

    def __init__(self, whole: Packed, samples: Tensor) -> None:
        self.padded = whole.padded.index_select(0, samples)
        self._real = whole.real.index_select(0, samples)
        self.rows = self.padded[self._real.squeeze(-1) > 0]

    @property
    def count(self) -> int:
        return len(self.padded)

    @property
    def real(self) -> Tensor:
        return self._real


class Hidden:
    """The gradient of the input projections -> that of the hidden ones, samples in front.

    Arguments:
        steps: how rows lie.
        reset: ``[b_0 + b_1 + …, hidden]``, the reset gate of a GRU; ``None`` for other cells.
    """

    def __init__(self, steps: Steps, reset: Tensor | None) -> None:
        self.steps, self.reset = steps, reset

    def __call__(self, g: Tensor) -> Tensor:
        if self.reset is not None:  # n_t = tanh(x_t + r_t h_t)
            gates, new = g.tensor_split([2 * self.reset.shape[-1]], -1)
            g = torch.cat([gates, new * self.reset], -1)
        return self.steps.samples_first(g)


def _beside(directions: list[Tensor]) -> Tensor:
    return directions[0] if len(directions) == 1 else torch.cat(directions, -1)


class RecurrentWatch(Watch[RecurrentProjection]):
    """Takes the place of a fused function and reports its projections, samples first."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in CELLS:
            return self._cell(func, *args)
        if func in SEQUENCES:
            return self._sequence(func, *args)
        return func(*args, **kwargs)

    def _cell(self, func: Any, x: Tensor, hx: Any, *weights: Any) -> Any:
        """``x [n, d]``: a sequence of one step."""
        if not torch.is_grad_enabled():
            return self._untouched(func, x, hx, *weights)
        state = hx if isinstance(hx, tuple) else (hx,)
        _, end = self._sweep(CELLS[func], 0, Weights(*weights), x, state, Steps([len(x)]))
        return end if isinstance(hx, tuple) else end[0]

    def _sequence(self, func: Any, x: Tensor, *rest: Any) -> Any:
        """``x [steps, n, d]``, ``[n, steps, d]`` or packed ``[b_0 + b_1 + ..., d]``."""
        if packed := isinstance(rest[2], list):
            sizes, hx, flat, biases, _, dropout, train, both = rest
            steps, batch_first = Steps(sizes.tolist(), sizes, self._order()), False
            rows = x
        else:
            hx, flat, biases, _, dropout, train, both, batch_first = rest
            x_first = x.transpose(0, 1) if batch_first else x
            steps = Steps([x_first.shape[1]] * len(x_first))
            rows = x_first.flatten(0, 1)
        drops = dropout if train else 0.0
        # A checkpointed call runs without a graph first, and has to draw the same dropout then.
        if not torch.is_grad_enabled() and not drops:
            return self._untouched(func, x, *rest)
        states = list(zip(*hx, strict=True)) if isinstance(hx, tuple) else [(h,) for h in hx]
        weights = list(by_cell(flat, biases, len(states)))
        ways = 2 if both else 1
        outs: list[Tensor] = []
        ends: list[State] = []
        for i, (w, state) in enumerate(zip(weights, states, strict=True)):
            if i % ways == 0 and i > 0:
                rows = _beside(outs[-ways:])
                rows = F.dropout(rows, drops) if drops else rows
            out, end = self._sweep(SEQUENCES[func], i, w, rows, state, steps, reverse=i % ways == 1)
            outs.append(out)
            ends.append(end)
        last = _beside(outs[-ways:])
        if not packed:
            last = last.unflatten(0, (len(steps.sizes), -1))
        ending = (torch.stack(part) for part in zip(*ends, strict=True))
        return last.transpose(0, 1) if batch_first else last, *ending

    def _sweep(
        self,
        step: Step,
        cell: int,
        w: Weights,
        rows: Tensor,
        state: State,
        steps: Steps,
        reverse: bool = False,
    ) -> tuple[Tensor, State]:
        """One layer in one direction over ``rows``; returns its outputs as rows, and its end."""
        layers = {layer.role: layer for layer in self.layers if layer.cell == cell}
        x = F.linear(rows, w.ih, w.bias_ih)
        probe = None
        if torch.is_grad_enabled():
            if "hh" in layers and not x.requires_grad:
                x.requires_grad_()  # its gradient is that of the hidden projections as well
            if "hr" in layers and w.hr is not None:
                # Zeros added to all outputs, whose gradients arrive there in one piece.
                probe = x.new_zeros(len(x), len(w.hr), requires_grad=True)
        probes = None if probe is None else probe.split(steps.sizes)
        ran = run(step, w, x.split(steps.sizes), state, reverse=reverse, probes=probes)
        if "ih" in layers:
            self.seen(layers["ih"], steps.keep(rows), x, steps.samples_first)
        if "hh" in layers:
            self.seen(layers["hh"], steps.keep(ran.hidden), x, Hidden(steps, ran.reset))
        if "hr" in layers and ran.raw is not None:
            out = ran.out if probe is None else probe
            self.seen(layers["hr"], steps.keep(ran.raw), out, steps.samples_first)
        return ran.out, ran.end

    def _untouched(self, func: Any, x: Tensor, *rest: Any) -> Any:
        """Without a graph the fused function runs; that there was a call is still told."""
        out = func(x, *rest)
        first = out if isinstance(out, Tensor) else out[0]
        for layer in self.layers:
            self.seen(layer, x, first, torch.detach)
        return out

    def _order(self) -> Tensor | None:
        """Where the samples of the packed sequence were before they were sorted by length."""
        found = (x.unsorted_indices for x in self.inputs if isinstance(x, PackedSequence))
        return next(found, None)
