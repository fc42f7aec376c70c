"""Blocks of networks, and the ways in which their gradients lie on ranks."""

from itertools import product

from natgrad.specs import BlockSpec, FactorSpec, Piece


def triangle(dim, batch=1):
    return FactorSpec(
        dim, batch, batch * dim * (dim + 1) // 2, parts=batch * (dim * dim + dim)
    )  # packed, and eigenvectors with eigenvalues


def diagonal(dim, batch=1):
    return FactorSpec(dim, batch, batch * dim, diagonal=True, parts=batch * dim)


def replicated(shape, size):
    """Data parallelism: every rank holds everything."""
    return [(tuple((0, n) for n in shape), tuple(range(size)))]


def sharded(shape, size):
    """FSDP: the first dimension in chunks of one length; the last may be short or missing."""
    rows, *rest = shape
    chunk = -(-rows // size)
    boxes = []
    for rank in range(size):
        start, stop = min(rows, rank * chunk), min(rows, (rank + 1) * chunk)
        if start < stop:
            boxes.append((((start, stop), *((0, n) for n in rest)), (rank,)))
    return boxes


def chunked(shape, size):
    """The same as one piece."""
    rows = shape[0]
    chunk = -(-rows // size)
    holders = range(-(-rows // chunk))
    whole = tuple((0, n) for n in shape)
    return [(whole, holders, chunk if len(holders) > 1 else None)]


def tensor_parallel(shape, size):
    """Two shards if that goes, each held by every second rank: tensor x data parallelism."""
    if size % 2 or shape[0] < 2:
        return replicated(shape, size)
    half = shape[0] // 2
    rest = [(0, n) for n in shape[1:]]
    return [
        (((0, half), *rest), tuple(range(0, size, 2))),
        (((half, shape[0]), *rest), tuple(range(1, size, 2))),
    ]


LAYOUTS = (replicated, sharded, chunked, tensor_parallel)


def block(name, kind, shape, factors, parameters, size, layout=replicated, **more):
    pieces = tuple(
        Piece(i, *piece)
        for i, parameter in enumerate(parameters)
        for piece in layout(parameter, size)
    )
    decomposed = more.pop("decomposed", tuple(factors))
    return BlockSpec(name, kind, shape, tuple(factors.items()), decomposed, pieces, **more)


def linear(name, rows, cols, size, layout=replicated, bias=True, **more):
    factors = {"A": triangle(cols + bias), "G": triangle(rows)}
    parameters = [(rows, cols), *[(rows,)] * bias]
    shape = (1, rows, cols + bias)
    return block(name, "Linear", shape, factors, parameters, size, layout, **more)


def norm(name, channels, size, layout=replicated):
    factors = {"F": triangle(2, channels)}
    parameters = [(channels,), (channels,)]
    return block(name, "LayerNorm", (channels, 2, 1), factors, parameters, size, layout)


def ekfac(name, rows, cols, size, layout=replicated):
    factors = {"A": triangle(cols), "G": triangle(rows), "S": diagonal(rows * cols)}
    more = {"decomposed": ("A", "G"), "in_basis": ("S",)}
    return block(name, "Linear", (1, rows, cols), factors, [(rows, cols)], size, layout, **more)


def tied(name, words, width, size, layout=replicated, in_basis=()):
    factors = {
        "A": diagonal(words),
        "G": triangle(width),
        "At": diagonal(words),
        "Gt": triangle(width),
    }
    factors |= {name: diagonal(words * width) for name in in_basis}
    more = {"decomposed": ("A", "G"), "together": True, "in_basis": in_basis}
    shape = (1, width, words)
    return block(name, "Embedding", shape, factors, [(words, width)], size, layout, **more)


def mixed(size, layout=replicated):
    """One block of every kind, some so small that not every rank gets a shard of them."""
    return [
        tied("embedding", 50, 8, size, layout),
        linear("first", 12, 7, size, layout),
        norm("norm", 3, size, layout),
        ekfac("rotated", 6, 5, size, layout),
        linear("wide", 5, 40, size, layout, bias=False),
        tied("both", 20, 4, size, layout, in_basis=("S",)),
        linear("head", 2, 12, size, layout),
    ]


def few(size, layout=replicated):
    """Fewer factors than most worlds have ranks."""
    return [linear("only", 6, 5, size, layout), tied("words", 9, 4, size, layout)]


def mlp(size, layout=replicated, depth=12):
    return [linear(f"l{i}", 16 * 2 ** (i % 3), 33, size, layout) for i in range(depth)]


NETWORKS = (mixed, few, mlp)


def resnet50(size=1, layout=replicated, norms=True):
    """Convolutions, their batch norms with diagonal Fisher, and the classifier: 107 layers."""
    blocks = []

    def conv(name, cout, cin, kernel):
        cols = cin * kernel**2
        factors = {"A": triangle(cols), "G": triangle(cout)}
        parameters = [(cout, cin, kernel, kernel)]
        shape = (1, cout, cols)
        blocks.append(block(name, "Conv2d", shape, factors, parameters, size, layout))
        if norms:
            bn = name.replace("conv", "bn").replace("downsample.0", "downsample.1")
            both = [(cout,), (cout,)]
            factors = {"F": diagonal(2 * cout)}
            blocks.append(block(bn, "BatchNorm2d", (cout, 2, 1), factors, both, size, layout))

    conv("conv1", 64, 3, 7)
    cin = 64
    for stage, (count, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for i in range(count):
            name = f"layer{stage}.{i}"
            conv(f"{name}.conv1", width, cin, 1)
            conv(f"{name}.conv2", width, width, 3)
            conv(f"{name}.conv3", 4 * width, width, 1)
            if i == 0:
                conv(f"{name}.downsample.0", 4 * width, cin, 1)
            cin = 4 * width
    blocks.append(linear("fc", 1000, 2048, size, layout))
    return blocks


def worlds(sizes=range(1, 9)):
    """(size, network, layout) of everything small."""
    return list(product(sizes, NETWORKS, LAYOUTS))
