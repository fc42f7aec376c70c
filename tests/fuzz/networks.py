"""Random networks as plain data: a description that prints as Python, and the module it stands for.

A piece that does not fit to what comes before it (a kernel larger than the image) is left out, so
that every description is a network and hypothesis need not throw examples away.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import Conv1D, Renamed
from recurrent_cases import HIDDEN

OUTPUTS = 3  # of a head
MOST = 160  # numbers in a sample, anywhere
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RECURRENT = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


@dataclass(frozen=True)
class Network:
    """``start``: ``("vector", d)``, ``("tokens", t, d)``, ``("words", t, entries, d, padding)`` or
    ``("image", c, *size)``. ``frozen``: parameters that are not trained, by number (modulo their
    count). ``end``: how positions become a vector for the head; None for no head."""

    start: tuple[Any, ...]
    pieces: tuple[tuple[Any, ...], ...]
    end: str | None = "mean"
    tied: bool = False
    frozen: tuple[int, ...] = ()
    checkpointed: bool | None = None  # and if so, whether reentrant

    def build(self, dtype: torch.dtype = torch.float64) -> "Body":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            body = Body(self).to(dtype)
            with torch.no_grad():
                for p in body.parameters():
                    p.copy_(torch.randn_like(p) * 0.5 / max(1, p[0].numel()) ** 0.5 + 0.05)
                for name, b in body.named_buffers():
                    if name.endswith(("running_mean", "running_var")):
                        b.uniform_(0.5, 1.5)
        # The oracle knows fused layers, and weights with several biases, as a whole only.
        whole = nn.MultiheadAttention | nn.RNNBase
        fused = [
            m for m in body.modules() if isinstance(m, whole) or getattr(m, "way", "") == "shared"
        ]
        inside = {p for module in fused for p in module.parameters()}
        parameters = [p for p in body.parameters() if p not in inside]
        chosen = {i % len(parameters) for i in self.frozen if parameters}
        if inside or len(chosen) < len(parameters):
            for i in chosen:
                parameters[i].requires_grad_(False)
        return body

    def inputs(self, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        kind, *sizes = self.start
        if kind == "words":
            return torch.randint(sizes[1], (n, sizes[0]), generator=generator)
        return torch.randn(n, *sizes, generator=generator, dtype=torch.float64).to(dtype)


class Body(nn.Module):
    """``forward`` is ``tail`` after ``front``; a caller may call the two by themselves."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.checkpointed = network.checkpointed
        kind, *sizes = network.start
        self.words = None
        shape = tuple(sizes)
        if kind == "words":
            t, entries, d, padding = sizes
            self.words = nn.Embedding(entries, d, padding_idx=padding)
            shape = (t, d)
        self.image = kind == "image"
        self.pieces = nn.ModuleList()
        for piece in network.pieces:
            made = fitted(piece, shape, self.image)
            if made is not None:
                self.pieces.append(made[0])
                shape = made[1]
        self.end = network.end
        self.head: nn.Module | None = None
        width = shape[0] if self.image else shape[-1]
        if network.tied and self.words is not None and width == self.words.embedding_dim:
            self.head = nn.Linear(width, self.words.num_embeddings, bias=False)
            self.head.weight = self.words.weight
            self.end = None
        elif network.end or not (len(self.pieces) or self.words is not None):
            flat = torch.Size(shape).numel() if self.end == "flatten" else width
            self.head = nn.Linear(flat, OUTPUTS)
            self.end = self.end or "mean"

    def front(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x)
        for piece in self.pieces[: len(self.pieces) // 2]:
            x = self._called(piece, x)
        return x

    def tail(self, x: Tensor) -> Tensor:
        for piece in self.pieces[len(self.pieces) // 2 :]:
            x = self._called(piece, x)
        if self.head is not None:
            if self.end == "mean" and x.ndim > 2:
                x = x.mean(tuple(range(2, x.ndim)) if self.image else tuple(range(1, x.ndim - 1)))
            x = self.head(x.flatten(1) if self.end == "flatten" else x)
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.front(x))

    def _called(self, piece: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointed is None or not torch.is_grad_enabled():
            return piece(x).tanh()
        if self.checkpointed and not x.requires_grad:
            x = x.detach().requires_grad_()  # what reentrant checkpoints ask for
        return checkpoint(piece, x, use_reentrant=self.checkpointed).tanh()


class Around(nn.Module):
    """``inner`` as the description says: with the tokens in front, folded into the batch, called
    twice, beside the identity; ``samples_axis`` is where the oracle finds the samples."""

    def __init__(self, inner: nn.Module, way: str, tokens: int) -> None:
        super().__init__()
        self.inner, self.way, self.tokens = inner, way, tokens
        if way == "tokens_first":
            for module in inner.modules():
                module.samples_axis = 1
        if way == "shared":
            self.second = nn.Linear(inner.in_features, inner.out_features, inner.bias is not None)
            self.second.weight = inner.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "tokens_first":
            return self.inner(x.transpose(0, 1)).transpose(0, 1)
        if self.way == "folded":
            return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if self.way == "twice":
            return self.inner(self.inner(x).tanh())
        if self.way == "shared":
            return self.second(self.inner(x).tanh())
        return x + self.inner(x)


class SelfAttention(nn.Module):
    def __init__(self, width: int, bias: bool, first: bool, cross: bool) -> None:
        super().__init__()
        heads = 2 if width % 2 == 0 else 1
        self.cross, self.first = cross, first
        self.attention = nn.MultiheadAttention(width, heads, bias=bias, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, 1) * 0.5 if self.cross else x
        if not self.first:
            x, other = x.transpose(0, 1), (other.transpose(0, 1) if self.cross else None)
            other = x if other is None else other
        out, _ = self.attention(x, other, other, need_weights=False)
        return out if self.first else out.transpose(0, 1)


class Recurrence(nn.Module):
    def __init__(self, kind: str, width: int, bias: bool, first: bool, both: bool) -> None:
        super().__init__()
        options = {"bias": bias, "batch_first": first, "bidirectional": both}
        self.rnn = RECURRENT[kind](width, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.rnn.batch_first:
            return self.rnn(x)[0]
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


def fitted(
    piece: tuple[Any, ...], shape: tuple[int, ...], image: bool
) -> tuple[nn.Module, tuple[int, ...]] | None:
    """The module and the shape of its output, or None if the piece does not fit."""
    kind, *options, way = piece
    with torch.random.fork_rng():
        module = (_of_images if image else _of_vectors)(kind, options, shape)
        if module is None:
            return None
        linear = isinstance(module, nn.Linear)
        of_tokens = not image and len(shape) == 2 and isinstance(module, nn.Linear | nn.LayerNorm)
        ways = {
            "tokens_first": of_tokens,
            "folded": of_tokens,
            "shared": linear and module.in_features == module.out_features,
        }
        wrapped = Around(module, way, shape[0]) if way and ways.get(way, True) else module
        found = None
        for tried in (wrapped, module):
            try:
                with torch.no_grad():
                    out = tried(torch.zeros(2, *shape))
            except (RuntimeError, ValueError):
                continue
            fits = 0 < out[0].numel() <= MOST and out.ndim == len(shape) + 1
            if fits and (tried is module or way != "beside" or out[0].shape == shape):
                found = tried, tuple(out.shape[1:])
                break
    return found


def _of_vectors(kind: str, options: list[Any], shape: tuple[int, ...]) -> nn.Module | None:
    width = shape[-1]
    if kind == "linear":
        out, bias, flavour = options
        if flavour == "conv1d":
            return Conv1D(out, width)
        return (Renamed if flavour == "renamed" else nn.Linear)(width, out, bias)
    if kind == "norm" and width > 1:  # of one number nothing is left but rounding errors
        return nn.RMSNorm(width) if options[0] % 2 else nn.LayerNorm(width, bias=options[0] % 4 > 0)
    if kind == "attention" and len(shape) == 2:
        return SelfAttention(width, *options)
    if kind == "recurrent" and len(shape) == 2:
        return Recurrence(options[0], width, *options[1:])
    return None


def _of_images(kind: str, options: list[Any], shape: tuple[int, ...]) -> nn.Module | None:
    channels, dims = shape[0], len(shape) - 1
    if kind == "norm" and torch.Size(shape[1:]).numel() > 1:
        which = options[0] % 4
        if which == 0:
            return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)
        if which == 1:
            return nn.LayerNorm(shape)
        if which == 2:
            return INSTANCE[dims - 1](channels, affine=True)
        return BATCH[dims - 1](channels).eval()
    if kind not in ("conv", "transposed"):
        return None
    out, groups, kernel, stride, dilation, padding, mode, bias = options
    groups = next(g for g in (groups, 1) if channels % g == 0)
    args = (channels, out * groups, kernel[:dims], stride[:dims])
    if kind == "transposed":
        pads = tuple(int(padding == 1) for _ in range(dims))
        return TRANSPOSED[dims - 1](*args, pads, 0, groups, bias, dilation[:dims])
    if padding in ("same", "valid"):
        args = (*args[:3], 1 if padding == "same" else args[3])
        return CONVS[dims - 1](*args, padding, dilation[:dims], groups, bias, mode)
    pads = (padding,) * dims
    return CONVS[dims - 1](*args, pads, dilation[:dims], groups, bias, mode)


# Strategies.

flags = st.booleans()
ways = st.sampled_from(["", "", "", "twice", "beside"])
triples = st.tuples(*(st.integers(1, 3) for _ in range(3)))
mostly_one = st.tuples(*(st.sampled_from([1, 1, 1, 2, 3]) for _ in range(3)))

linears = st.tuples(
    st.just("linear"),
    st.integers(1, 5),
    flags,
    st.sampled_from(["", "", "renamed", "conv1d"]),
    st.sampled_from(["", "", "", "twice", "beside", "tokens_first", "folded", "shared"]),
)
norms = st.tuples(
    st.just("norm"), st.integers(0, 5), st.sampled_from(["", "", "tokens_first", "folded", "twice"])
)
attentions = st.tuples(st.just("attention"), flags, flags, flags, ways)
recurrences = st.tuples(
    st.just("recurrent"), st.sampled_from(["rnn", "lstm", "gru"]), flags, flags, flags, ways
)
convs = st.tuples(
    st.sampled_from(["conv", "conv", "transposed"]),
    st.integers(1, 3),
    st.sampled_from([1, 1, 2, 3]),
    triples,
    mostly_one,
    mostly_one,
    st.sampled_from([0, 1, 1, 2, "same", "valid"]),
    st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]),
    flags,
    ways,
)
starts = st.one_of(
    st.tuples(st.just("vector"), st.integers(1, 6)),
    st.tuples(st.just("tokens"), st.integers(1, 5), st.integers(1, 6)),
    st.tuples(
        st.just("words"),
        st.integers(1, 5),
        st.integers(3, 6),
        st.integers(1, 5),
        st.sampled_from([None, 0, 2]),
    ),
    st.tuples(st.just("image"), st.integers(1, 4), st.integers(2, 8)),
    st.tuples(st.just("image"), st.integers(1, 4), st.integers(2, 6), st.integers(2, 6)),
    st.tuples(st.just("image"), st.integers(1, 2), *(st.integers(2, 4) for _ in range(3))),
)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    start = draw(starts)
    if start[0] == "image":
        pieces = st.one_of(convs, convs, norms)
    elif start[0] == "vector":
        pieces = st.one_of(linears, linears, norms)
    else:
        pieces = st.one_of(linears, norms, attentions, recurrences)
    return Network(
        start,
        tuple(draw(st.lists(pieces, min_size=1, max_size=3))),
        draw(st.sampled_from(["mean", "flatten", None])),
        draw(flags) and start[0] == "words",
        tuple(draw(st.lists(st.integers(0, 20), max_size=2))) if draw(flags) else (),
        draw(st.sampled_from([None, None, None, False, True])),
    )
