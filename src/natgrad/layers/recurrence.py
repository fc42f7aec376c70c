"""The recurrences of torch's fused functions, written out.

``h_t = cell(W_ih x_t + b_ih, W_hh h_{t-1} + b_hh, h_{t-1})``, one time step after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # hidden state, and the cell state of an LSTM
# Both projections and the state -> the next state, and the reset gate of a GRU.
Step = Callable[[Tensor, Tensor, State], tuple[State, Tensor | None]]


class Weights(NamedTuple):
    """Those of one layer and direction, in the order of a fused function.

    Arguments:
        ih: ``[gates * hidden, inputs]``, of the inputs.
        hh: ``[gates * hidden, hidden]``, of the hidden state.
        bias_ih: ``[gates * hidden]``, or ``None``.
        bias_hh: ``[gates * hidden]``, or ``None``.
        hr: ``[proj_size, hidden]`` of an LSTM with a projection, else ``None``.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None


class UnrolledRecurrence(NamedTuple):
    """What a recurrence went through, as rows ``[b_0 + b_1 + ..., d]`` in the order of time.

    Arguments:
        out: ``h_t``, after its projection if there is one.
        end: the state after the last step.
        hidden: ``h_{t-1}``, detached.
        raw: ``h_t`` before its projection, detached; ``None`` without one.
        reset: the reset gate of a GRU, detached; ``None`` for other cells.
    """

    out: Tensor
    end: State
    hidden: Tensor  # h_{t-1}, detached
    raw: Tensor | None  # h_t before its projection, detached
    reset: Tensor | None  # of a GRU, detached


def run(
    step: Step,
    w: Weights,
    xs: Sequence[Tensor],
    state: State,
    *,
    reverse: bool,
    probes: Sequence[Tensor] | None,
) -> UnrolledRecurrence:
    """One layer and direction of a recurrence, step by step.

    Arguments:
        step: one time step of the cell: ``(projected input, projected hidden state, state)`` to the
            next state.
        w: the weights of this layer and direction.
        xs: ``xs[t] [b_t, gates * hidden]``, the projected inputs of the ``b_t`` samples that last
            until ``t``.
        state: hidden state ``[b, …]``, and the cell state of an LSTM, at the start; ``b`` is the
            largest ``b_t``.
        reverse: whether time runs backwards.
        probes: ``probes[t]`` is added to ``h_t`` after its projection (of an LSTM with
            ``proj_size``), so that its gradient can be read; ``None`` adds nothing.
    """
    hidden, raw, out = ([xs[0]] * len(xs) for _ in range(3))
    resets: list[Tensor | None] = [None] * len(xs)
    times = range(len(xs))
    for t in reversed(times) if reverse else times:
        n = len(xs[t])
        # Samples that have ended, or in reverse not begun yet, keep their state.
        others = tuple(s[n:] for s in state) if n < len(state[0]) else ()
        state = tuple(s[:n] for s in state) if others else state
        hidden[t] = state[0].detach()
        state, resets[t] = step(xs[t], F.linear(state[0], w.hh, w.bias_hh), state)
        if w.hr is not None:
            raw[t] = state[0].detach()
            h = F.linear(state[0], w.hr)
            state = (h if probes is None else h + probes[t], *state[1:])
        out[t] = state[0]
        if others:
            state = tuple(torch.cat(pair) for pair in zip(state, others, strict=True))
    gates = [r.detach() for r in resets if r is not None]
    return UnrolledRecurrence(
        torch.cat(out),
        state,
        torch.cat(hidden),
        torch.cat(raw) if w.hr is not None else None,
        torch.cat(gates) if gates else None,
    )


def by_cell(flat: Sequence[Tensor], biases: bool, cells: int) -> Iterator[Weights]:
    """The list of weights that a fused function gets, by layer and direction.

    Arguments:
        flat: all weights, in the order of the fused function.
        biases: whether there are biases.
        cells: layers times directions.
    """
    each = len(flat) // cells
    for i in range(0, len(flat), each):
        own = flat[i : i + each]
        b_ih, b_hh = own[2:4] if biases else (None, None)
        yield Weights(own[0], own[1], b_ih, b_hh, own[-1] if each % 2 else None)


def _tanh(x: Tensor, h: Tensor, state: State) -> tuple[State, None]:
    return ((x + h).tanh(),), None


def _relu(x: Tensor, h: Tensor, state: State) -> tuple[State, None]:
    return ((x + h).relu(),), None


def _lstm(x: Tensor, h: Tensor, state: State) -> tuple[State, None]:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c.tanh(), c), None


def _gru(x: Tensor, h: Tensor, state: State) -> tuple[State, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    reset, update = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    new = (xn + reset * hn).tanh()
    return ((state[0] - new) * update + new,), reset


SEQUENCES: dict[Any, Step] = {
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
    torch.lstm: _lstm,
    torch.gru: _gru,
}
CELLS: dict[Any, Step] = {
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
}
