"""The one list of layers and small models that tests loop over.

A case is a model, its inputs and what of them is a sample. Sizes are small and odd, so that no two
axes are mistaken for each other; `inputs(n)` gives `n` samples in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from own_modules import ChannelsNorm, LayerScale, OnePlusWeight, RightProduct


@dataclass(frozen=True)
class Case:
    """`batches` are numbers of samples worth trying; `batched=False`: inputs have no such axis."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    batches: tuple[int, ...] = (1, 3)
    batched: bool = True
    batch_axis: int = 0
    training: bool = True

    def __str__(self) -> str:
        return self.name

    def model(self, seed: int = 0) -> nn.Module:
        """In float64, with parameters that are neither ones nor zeros."""
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            model = self.build().double()
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn_like(p) * 0.5 + 0.1)
                for name, b in model.named_buffers():
                    if name.endswith(("running_mean", "running_var")):
                        b.uniform_(0.5, 1.5)
        return model.train(self.training)

    def data(self, n: int, seed: int = 1) -> tuple[Any, ...]:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            return self.inputs(n)

    def samples(self, n: int) -> int:
        return n if self.batched else 1

    def samples_first(self, t: Tensor) -> Tensor:
        return t.movedim(self.batch_axis, 0) if self.batched else t.unsqueeze(0)


def losses(case: Case, out: Tensor) -> Tensor:
    """One loss per sample: convex, not symmetric between entries, nowhere flat."""
    rows = case.samples_first(out).flatten(1)
    each = torch.linspace(0.3, 1.7, rows.shape[1], dtype=out.dtype) * 1.5
    sign = 1 - 2 * (torch.arange(rows.shape[1]) % 3 == 1).to(out.dtype)
    return F.softplus(each * sign * rows).sum(1)


def randn(*shape: int) -> Callable[[int], tuple[Tensor]]:
    """Inputs `[n, *shape]`."""
    return lambda n: (torch.randn(n, *shape, dtype=torch.float64),)


def unbatched(*shape: int) -> Callable[[int], tuple[Tensor]]:
    return lambda n: (torch.randn(*shape, dtype=torch.float64),)


def indices(entries: int, *shape: int, padding: int | None = None) -> Callable[[int], Any]:
    """Indices `[n, *shape]`, with `padding` in the first of several places."""

    def make(n: int) -> tuple[Tensor]:
        x = torch.randint(entries, (n, *shape))
        if padding is not None and shape:
            x[:, 0] = padding
            x[-1, -1] = padding
        return (x,)

    return make


# Modules that torch does not have in this form.


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


class Conv1D(nn.Module):
    """What `transformers.pytorch_utils.Conv1D` is: a linear layer with a transposed weight."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(-1, self.nx) @ self.weight + self.bias).view(*x.shape[:-1], self.nf)


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


class Renamed(nn.Linear):
    """A subclass that computes what its base class does."""


class Twice(nn.Module):
    """One module called twice in a forward pass, the second time on its own output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class ThriceOnOne(nn.Module):
    """One module called on the same input over and over and on another, beside a second module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.one(x.square()) + self.other(x.square())  # its gradients come last
        return early * self.other(x) + self.one(x).tanh() * self.one(x) + self.one(x)


class Shared(nn.Module):
    """Two modules with one weight; their biases are their own."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=bias), nn.Linear(3, 3, bias=bias)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """A language model without a middle: embedding, nonlinearity, head with the same weight."""

    def __init__(self, bias: bool, entries: int = 5, width: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, width)
        self.head = nn.Linear(width, entries, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


class BesideTied(nn.Module):
    """A layer on the input of a tied head, as wide as the head's weight is high."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 3)
        self.gate = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embedding(x))
        return self.head(h) * self.gate(h)


class Flattened(nn.Module):
    """Tokens are folded into the batch: `[n, t, d]` -> `[n t, d]`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Attention(nn.Module):
    """`roles` says which of the model's inputs are query, key and value."""

    def __init__(self, roles: tuple[int, int, int], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.roles = roles
        self.attention = nn.MultiheadAttention(*args, **kwargs)

    def forward(self, *inputs: Tensor) -> Tensor:
        out, _ = self.attention(*(inputs[role] for role in self.roles), need_weights=False)
        return out


def attention(
    name: str, roles: tuple[int, int, int], *shapes: tuple[int, int], **kwargs: Any
) -> Case:
    """`shapes` are `(tokens, width)` of the inputs; the query's width is 4."""
    first = kwargs.get("batch_first", True)
    batched = not kwargs.pop("unbatched", False)

    def inputs(n: int) -> tuple[Tensor, ...]:
        if not batched:
            return tuple(torch.randn(t, d, dtype=torch.float64) for t, d in shapes)
        size = [(n, t, d) if first else (t, n, d) for t, d in shapes]
        return tuple(torch.randn(*s, dtype=torch.float64) for s in size)

    return Case(
        f"attention-{name}",
        lambda: Attention(roles, 4, 2, **{"batch_first": True, **kwargs}),
        inputs,
        batched=batched,
        batch_axis=0 if first or not batched else 1,
    )


def conv(name: str, dims: int, *args: Any, size: tuple[int, ...], **kwargs: Any) -> Case:
    """`args` are input channels, output channels and kernel."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return Case(f"conv{dims}d-{name}", lambda: kind(*args, **kwargs), randn(args[0], *size))


def transposed(name: str, dims: int, *args: Any, size: tuple[int, ...], **kwargs: Any) -> Case:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return Case(f"transposed{dims}d-{name}", lambda: kind(*args, **kwargs), randn(args[0], *size))


def with_statistics(training: bool) -> list[Case]:
    """Norm layers that compute something else in training than in evaluation."""
    mode = "train" if training else "eval"

    def case(name: str, build: Callable[[], nn.Module], inputs: Any, **more: Any) -> Case:
        return Case(f"{name}-{mode}", build, inputs, training=training, **more)

    def instance_norm(dims: int, **more: Any) -> Callable[[], nn.Module]:
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
        return lambda: kind(3, affine=True, **more)

    untracked = {"track_running_stats": False, "eps": 0.1}
    tracked = {"track_running_stats": True, "eps": 0.1}
    return [
        case("batchnorm", lambda: nn.BatchNorm1d(3), randn(3), batches=(2, 5)),
        case("batchnorm1d", lambda: nn.BatchNorm1d(3), randn(3, 4)),
        case("batchnorm2d", lambda: nn.BatchNorm2d(3), randn(3, 2, 5)),
        case("batchnorm3d", lambda: nn.BatchNorm3d(3), randn(3, 2, 2, 3)),
        case("batchnorm2d-untracked", lambda: nn.BatchNorm2d(3, **untracked), randn(3, 2, 5)),
        case("batchnorm-flattened", lambda: Flattened(nn.BatchNorm1d(3)), randn(4, 3)),
        case("instancenorm1d", instance_norm(1), randn(3, 4)),
        case("instancenorm1d-tracked", instance_norm(1, **tracked), randn(3, 4)),
        case("instancenorm2d", instance_norm(2), randn(3, 2, 5)),
        case("instancenorm2d-tracked", instance_norm(2, **tracked), randn(3, 2, 5)),
        case("instancenorm3d-tracked", instance_norm(3, **tracked), randn(3, 2, 2, 3)),
        case("instancenorm2d-unbatched", instance_norm(2), unbatched(3, 2, 4), batched=False),
    ]


LINEAR = [
    Case("linear", lambda: nn.Linear(3, 2), randn(3), batches=(1, 4)),
    Case("linear-unbatched", lambda: nn.Linear(3, 2), unbatched(3), batches=(1,), batched=False),
    Case("linear-2", lambda: nn.Linear(3, 2), randn(5, 3)),
    Case("linear-3", lambda: nn.Linear(3, 2), randn(2, 3, 3)),
    Case("linear-no-bias", lambda: nn.Linear(3, 2, bias=False), randn(5, 3)),
    Case("linear-frozen-weight", lambda: frozen(nn.Linear(3, 2), "weight"), randn(5, 3)),
    Case("linear-frozen-bias", lambda: frozen(nn.Linear(3, 2), "bias"), randn(5, 3)),
    Case("linear-one-to-one", lambda: nn.Linear(1, 1), randn(1)),
    Case("linear-subclass", lambda: Renamed(3, 2), randn(3)),
    Case("linear-flattened", lambda: Flattened(nn.Linear(3, 2)), randn(5, 3)),
    Case(
        "linear-batch-axis-1",
        lambda: nn.Linear(3, 2),
        lambda n: (torch.randn(5, n, 3, dtype=torch.float64),),
        batch_axis=1,
    ),
    Case("huggingface-conv1d", lambda: Conv1D(2, 3), randn(5, 3)),
]

CONV = [
    conv("plain", 1, 2, 3, 3, size=(7,)),
    conv("stride-dilation", 1, 2, 3, 2, size=(9,), stride=2, dilation=3, padding=1),
    conv("groups", 1, 4, 6, 3, size=(5,), groups=2, bias=False),
    conv("same", 1, 2, 3, 4, size=(6,), padding="same"),
    conv("one-pixel", 1, 2, 3, 5, size=(5,)),
    conv("plain", 2, 2, 3, (2, 3), size=(4, 5)),
    conv("no-bias", 2, 2, 3, (2, 3), size=(4, 5), bias=False),
    conv("kernel-1", 2, 3, 2, 1, size=(3, 2)),
    conv("kernel-1-no-bias", 2, 3, 2, 1, size=(3, 2), bias=False),
    conv("kernel-1-stride", 2, 3, 2, 1, size=(5, 4), stride=(2, 3)),
    conv("kernel-1-padding", 2, 3, 2, 1, size=(3, 2), padding=1),
    conv("kernel-1-circular", 2, 3, 2, 1, size=(3, 2), padding=1, padding_mode="circular"),
    conv("correlations", 2, 2, 3, 3, size=(4, 5), padding=1),
    conv("correlations-no-bias", 2, 2, 3, 3, size=(5, 4), padding=1, bias=False),
    conv("correlations-one-pixel", 2, 2, 3, 3, size=(1, 1), padding=1),
    conv("correlations-dilation", 2, 2, 3, 3, size=(5, 4), padding=2, dilation=(2, 1)),
    conv("correlations-1d", 1, 2, 3, 3, size=(5,), padding=1),
    conv("5x5-same", 2, 2, 2, 5, size=(4, 6), padding="same"),
    conv("same-even", 2, 2, 3, (2, 4), size=(4, 5), padding="same", dilation=(3, 1)),
    conv("valid", 2, 2, 3, 3, size=(4, 5), padding="valid"),
    conv("stride", 2, 2, 3, 3, size=(7, 6), stride=(3, 2), padding=(1, 2)),
    conv("groups", 2, 4, 6, (3, 2), size=(4, 3), groups=2, padding=1),
    conv("depthwise", 2, 3, 3, 3, size=(4, 3), groups=3, padding=1),
    conv("depthwise-multiplier", 2, 3, 6, 2, size=(4, 3), groups=3, stride=2, bias=False),
    conv("one-pixel", 2, 2, 3, (3, 2), size=(3, 2)),
    conv("reflect", 2, 2, 3, 3, size=(4, 5), padding=(2, 1), padding_mode="reflect"),
    conv("replicate", 2, 2, 3, 3, size=(4, 5), padding=(2, 1), padding_mode="replicate"),
    conv("circular", 2, 2, 3, 3, size=(4, 5), padding=(2, 1), padding_mode="circular"),
    conv("circular-same", 2, 2, 3, (3, 2), size=(4, 5), padding="same", padding_mode="circular"),
    conv("plain", 3, 2, 3, (1, 2, 2), size=(2, 3, 4)),
    conv("everything", 3, 2, 4, 2, size=(3, 4, 3), groups=2, padding=1, stride=(1, 2, 1)),
    conv("replicate", 3, 1, 2, 2, size=(2, 2, 3), padding=1, padding_mode="replicate"),
    conv("same", 3, 1, 2, (2, 1, 3), size=(2, 2, 3), padding="same"),
    Case(
        "conv2d-channels-last",
        lambda: nn.Conv2d(2, 3, 3, padding=1),
        lambda n: (randn(2, 4, 5)(n)[0].contiguous(memory_format=torch.channels_last),),
    ),
    Case(
        "conv2d-channels-last-kernel-1",
        lambda: nn.Conv2d(2, 3, 1, bias=False),
        lambda n: (randn(2, 4, 5)(n)[0].contiguous(memory_format=torch.channels_last),),
    ),
    Case("conv1d-unbatched", lambda: nn.Conv1d(2, 3, 3), unbatched(2, 5), (1,), batched=False),
    Case("conv2d-unbatched", lambda: nn.Conv2d(2, 3, 2), unbatched(2, 3, 4), (1,), batched=False),
    Case("conv2d-frozen-weight", lambda: frozen(nn.Conv2d(2, 3, 2), "weight"), randn(2, 3, 4)),
    Case(
        "conv2d-frozen-bias", lambda: frozen(nn.Conv2d(2, 3, 3, padding=1), "bias"), randn(2, 3, 4)
    ),
    transposed("plain", 1, 2, 3, 3, size=(4,)),
    transposed("stride", 1, 2, 3, 3, size=(4,), stride=2, padding=1, output_padding=1),
    transposed("dilation", 1, 2, 3, 2, size=(4,), dilation=3, output_padding=2, stride=2),
    transposed("plain", 2, 2, 3, (2, 3), size=(2, 3)),
    transposed("no-bias", 2, 2, 3, 2, size=(2, 3), bias=False, stride=2),
    transposed("groups", 2, 4, 6, 2, size=(2, 3), groups=2, stride=2, output_padding=1),
    transposed("padding", 2, 2, 3, 3, size=(3, 2), padding=(1, 2), stride=(2, 3)),
    transposed("spare", 2, 2, 2, 2, size=(2, 2), dilation=3, output_padding=2),
    transposed("one-pixel", 2, 2, 3, 1, size=(1, 1)),
    transposed("everything", 3, 2, 2, 2, size=(2, 1, 2), groups=2, stride=2, padding=(1, 0, 0)),
    Case(
        "transposed1d-unbatched",
        lambda: nn.ConvTranspose1d(2, 3, 2),
        unbatched(2, 3),
        (1,),
        batched=False,
    ),
    Case(
        "transposed2d-frozen-weight",
        lambda: frozen(nn.ConvTranspose2d(2, 3, 2), "weight"),
        randn(2, 2, 3),
    ),
]

EMBEDDING = [
    Case("embedding", lambda: nn.Embedding(5, 3), indices(5)),
    Case("embedding-2", lambda: nn.Embedding(5, 3), indices(5, 4)),
    Case("embedding-3", lambda: nn.Embedding(5, 3), indices(5, 2, 2)),
    Case(
        "embedding-padding",
        lambda: nn.Embedding(5, 3, padding_idx=1),
        indices(5, 4, padding=1),
    ),
    Case(
        "embedding-flattened",
        lambda: Flattened(nn.Embedding(5, 3, padding_idx=2)),
        indices(5, 4, padding=2),
    ),
]

NORM = [
    Case("layernorm", lambda: nn.LayerNorm(5), randn(5)),
    Case("layernorm-unbatched", lambda: nn.LayerNorm(5), unbatched(5), (1,), batched=False),
    Case("layernorm-2", lambda: nn.LayerNorm(5), randn(3, 5)),
    Case("layernorm-2d-shape", lambda: nn.LayerNorm((2, 3)), randn(4, 2, 3)),
    Case("layernorm-no-bias", lambda: nn.LayerNorm(5, bias=False), randn(3, 5)),
    Case("layernorm-frozen-weight", lambda: frozen(nn.LayerNorm(5), "weight"), randn(3, 5)),
    Case("layernorm-flattened", lambda: Flattened(nn.LayerNorm(5)), randn(3, 5)),
    Case(
        "layernorm-batch-axis-1",
        lambda: nn.LayerNorm(5),
        lambda n: (torch.randn(4, n, 5, dtype=torch.float64),),
        batch_axis=1,
    ),
    Case("rmsnorm", lambda: nn.RMSNorm(5), randn(3, 5)),
    Case("rmsnorm-2d-shape", lambda: nn.RMSNorm((2, 3), eps=0.1), randn(2, 3)),
    Case("own-rmsnorm", lambda: OnePlusWeight(5), randn(3, 5)),
    Case("own-channelnorm", lambda: ChannelsNorm(3), randn(3, 2, 5)),
    Case("layer-scale", lambda: LayerScale(5), randn(3, 5)),
    Case("layer-scale-channels", lambda: LayerScale(3, (1, 1)), randn(3, 2, 5)),
    Case("groupnorm", lambda: nn.GroupNorm(2, 4), randn(4, 3)),
    Case("groupnorm-2d", lambda: nn.GroupNorm(1, 3), randn(3, 2, 5)),
    Case("groupnorm-no-space", lambda: nn.GroupNorm(2, 6), randn(6)),
    *with_statistics(training=True),
    *with_statistics(training=False),
]

# Seldom, or not of torch.
OTHERS = [
    Case("own-right-product", lambda: RightProduct(3, 2), randn(5, 3)),
    Case(
        "bilinear",
        lambda: nn.Bilinear(2, 3, 2),
        lambda n: tuple(torch.randn(n, 4, k, dtype=torch.float64) for k in (2, 3)),
    ),
]

ATTENTION = [
    attention("self", (0, 0, 0), (3, 4)),
    attention("self-tokens-first", (0, 0, 0), (3, 4), batch_first=False),
    attention("self-no-bias", (0, 0, 0), (3, 4), bias=False),
    attention("self-unbatched", (0, 0, 0), (3, 4), unbatched=True),
    attention("key-is-value", (0, 1, 1), (3, 4), (5, 4)),
    attention("key-is-value-tokens-first", (0, 1, 1), (3, 4), (5, 4), batch_first=False),
    attention("all-different", (0, 1, 2), (3, 4), (5, 4), (5, 4)),
    attention("cross", (0, 1, 2), (3, 4), (5, 3), (5, 2), kdim=3, vdim=2),
    attention("cross-tokens-first", (0, 1, 1), (3, 4), (5, 3), kdim=3, vdim=3, batch_first=False),
    attention("cross-no-bias", (0, 1, 1), (3, 4), (5, 3), kdim=3, vdim=3, bias=False),
    attention("cross-unbatched", (0, 1, 1), (3, 4), (5, 3), kdim=3, vdim=3, unbatched=True),
]

REUSED = [
    Case("twice-linear", lambda: Twice(nn.Linear(3, 3)), randn(3)),
    Case("twice-linear-2", lambda: Twice(nn.Linear(3, 3)), randn(4, 3)),
    Case("twice-conv", lambda: Twice(nn.Conv2d(2, 2, 3, padding=1)), randn(2, 3, 4)),
    Case("twice-conv-shrinking", lambda: Twice(nn.Conv1d(2, 2, 2)), randn(2, 5)),
    Case("twice-layernorm", lambda: Twice(nn.LayerNorm(3)), randn(4, 3)),
    Case("thrice-on-one", ThriceOnOne, randn(4, 3)),
    Case("shared", lambda: Shared(bias=False), randn(3)),
    Case("shared-own-biases", lambda: Shared(bias=True), randn(4, 3)),
    Case("tied", lambda: Tied(bias=False), indices(5, 4)),
    Case("tied-bias", lambda: Tied(bias=True), indices(5, 4)),
    Case("tied-one-token", lambda: Tied(bias=False), indices(5)),
    Case("tied-beside-linear", BesideTied, indices(3, 4)),
]

CASES = [*LINEAR, *CONV, *EMBEDDING, *NORM, *OTHERS, *ATTENTION, *REUSED]


# Small networks of several layers.


class TransformerBlock(nn.Module):
    """Embedding, attention, an MLP and norms, with a head on every token."""

    def __init__(self, entries: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width))
        self.head = nn.Linear(width, entries)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        z = self.norm(h)
        h = h + self.attention(z, z, z, need_weights=False)[0]
        return self.head(h + self.mlp(h))


MODELS = [
    Case(
        "mlp",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)),
        randn(3),
        batches=(6,),
    ),
    Case(
        "cnn",
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.GroupNorm(1, 3),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, stride=2),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(18, 3),
        ),
        randn(2, 5, 5),
        batches=(6,),
    ),
    Case("transformer", TransformerBlock, indices(5, 3), batches=(6,)),
]
