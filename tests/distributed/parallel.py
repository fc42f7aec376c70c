"""Networks that tensor parallelism can cut, and the many ways of spreading them over ranks."""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

EACH = 4  # samples of a data-parallel replica in a step
TOKENS, LETTERS, CLASSES = 8, 12, 6


class Tower(nn.Module):
    """Perceptrons on sequences, with a norm between them. No size needs to be even."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, wide), nn.Linear(wide, narrow)
        self.norm = nn.LayerNorm(narrow)
        self.third, self.gate = nn.Linear(narrow, wide), nn.Linear(narrow, wide)
        self.fourth, self.fifth = nn.Linear(wide, narrow), nn.Linear(wide, narrow, bias=False)
        self.left, self.right = nn.Linear(narrow, CLASSES), nn.Linear(narrow, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        x = self.third(self.norm(x)).tanh() * self.gate(x).sigmoid()
        one, other = self.fourth(x), self.fifth(x)
        return (self.left(one) + self.right(other)).transpose(1, 2)


class Attention(nn.Module):
    """On as many heads as there are columns on this rank."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model of one block, of layers that tensor parallelism knows."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 8)
        self.block = Block(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, LETTERS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(tokens)))).transpose(1, 2)


class Branches(nn.Module):
    """``extra`` is used by those samples alone whose index is in ``users``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(5, 7), nn.Linear(7, 7)
        self.last = nn.Linear(7, CLASSES)
        self.users = slice(None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if len(x[self.users]):
            more = self.extra(x[self.users]).tanh()
            x = torch.cat([x[self.users] + more, x[self.users.stop or len(x) :]])
        return self.last(x).transpose(1, 2)


def chain() -> nn.Module:
    """Of layers whose sizes are all different."""
    sizes = [(5, 19), (19, 23), (23, 29), (29, CLASSES)]
    return nn.Sequential(*(nn.Linear(*size) for size in sizes), Classes())


class Classes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


NETWORKS = {
    "tower": lambda: Tower(8, 4),
    "uneven": lambda: Tower(7, 5),
    "transformer": lambda: Transformer(tied=False),
    "tied": lambda: Transformer(tied=True),
    "branches": Branches,
    "chain": chain,
}


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().to(dtype)


def batch(name: str, step: int, samples: int) -> tuple[Tensor, Tensor]:
    """The same first samples, whatever their number."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + step)
        if name in ("transformer", "tied"):
            tokens = torch.randint(LETTERS, (16, TOKENS))
            return tokens[:samples], tokens.roll(1, 1)[:samples]
        x = torch.randn(16, TOKENS, 5, dtype=torch.float64)
        y = torch.randint(CLASSES, (16, TOKENS))
    return x[:samples], y[:samples]


# How a model is cut.


def styles(name: str, sequences: bool = True) -> dict[str, Any]:
    """What is replicated outside of columns and rows is cut along the sequence, if wanted."""
    between = Shard(1) if sequences else Replicate()
    even = name != "uneven"  # a part that goes without its layout is taken for as large as others
    column = ColwiseParallel(input_layouts=between, use_local_output=even)
    row = RowwiseParallel(output_layouts=between)
    if name in ("tower", "uneven"):
        found = {"first": ColwiseParallel(use_local_output=even), "second": row}
        found |= {"third": column, "gate": column}
        found |= {name: RowwiseParallel() for name in ("fourth", "fifth")}
        found["norm"] = SequenceParallel()
    else:
        attention = "block.attention"
        found = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            attention: PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            ),
            **{f"{attention}.{layer}": ColwiseParallel() for layer in ("query", "key", "value")},
            f"{attention}.out": row,
            "block.up": column,
            "block.down": row,
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
            **{norm: SequenceParallel() for norm in ("norm", "block.norm1", "block.norm2")},
        }
    if not sequences:
        return {k: style for k, style in found.items() if not isinstance(style, SequenceParallel)}
    return found


def cut(model: nn.Module, name: str, mesh: DeviceMesh, layout: str = "tp") -> nn.Module:
    wanted = styles(name, layout != "tp without sequences")
    if layout == "tp with its loss":
        wanted["head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallelize_module(model, mesh, wanted)
    if name == "tied":
        model.head.weight = model.embed.weight  # cutting made two of one
    return model


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """One group of FSDP for each child, so that buckets leave while others are gathered."""
    tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    for child in model.children():
        if not tied or isinstance(child, Block | nn.LayerNorm):
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def spread(
    model: nn.Module, name: str, layout: str, options: dict[str, Any]
) -> tuple[nn.Module, int, int]:
    """The model on this rank, which part of the batch it sees, and how many parts there are;
    ``options`` are those of DDP or ``fully_shard``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    match layout:
        case "tp" | "tp without sequences" | "tp with its loss":
            mesh = init_device_mesh("cpu", (ranks,))
            return cut(model, name, mesh, layout), 0, 1
        case "fsdp + tp":
            mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
            cut(model, name, mesh["tensor"])
            return shard(model, mesh["data"], **options), rank // 2, ranks // 2
        case "hsdp + tp":
            names = ("replicas", "shards", "tensor")
            mesh = init_device_mesh("cpu", (ranks // 2, 1, 2), mesh_dim_names=names)
            cut(model, name, mesh["tensor"])
            return shard(model, mesh["replicas", "shards"], **options), rank // 2, ranks // 2
        case "fsdp":
            mesh = init_device_mesh("cpu", (ranks,))
            return shard(model, mesh, **options), rank, ranks
        case "hsdp":
            names = ("replicas", "shards")
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
            return shard(model, mesh, **options), rank, ranks
        case "ddp":
            return nn.parallel.DistributedDataParallel(model, **options), rank, ranks
        case "replicated":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            return replicate(model, mesh=init_device_mesh("cpu", (ranks,))), rank, ranks
        case "replicated + tp":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
            cut(model, name, mesh["tensor"])
            return replicate(model, mesh=mesh["data"]), rank // 2, ranks // 2
        case "one batch":  # replicated parameters and one batch that is spread
            return distribute_module(model, init_device_mesh("cpu", (ranks,))), 0, 1
    raise ValueError(layout)


def by_columns(p: nn.Parameter) -> Shard | None:
    """For ``fully_shard``, which cuts only rows unevenly."""
    return Shard(1) if p.ndim == 2 and p.shape[1] % dist.get_world_size() == 0 else None


def quiet() -> None:
    """What torch says of every Linear on sequences, and of parameters that are cut twice."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
