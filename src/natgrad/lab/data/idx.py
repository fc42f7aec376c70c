"""The idx format: two zeros, the type (8: bytes), the number of axes, their sizes, the numbers."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from natgrad.lab.data import files
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images, Normalise
from natgrad.lab.data.locations import find, spoilt
from natgrad.lab.data.sources import Source


def read(path: Path, axes: int, source: Source) -> Tensor:
    """Bytes with so many axes, plain or compressed by gzip."""
    data = files.read(path, source)
    if len(data) < 4 or data[:4] != bytes((0, 0, 8, axes)):
        raise spoilt(
            path,
            f"is no idx file of bytes with {axes} axes: it starts with {data[:4].hex(' ') or '–'}",
            source,
        )
    start = 4 * (axes + 1)
    if len(data) < start:
        raise spoilt(path, "is truncated: it ends before its numbers begin", source)
    sizes = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    held, wanted = len(data) - start, prod(sizes)
    if held != wanted:
        how = "truncated" if held < wanted else "too long"
        shape = " x ".join(f"{size:,}" for size in sizes)
        raise spoilt(path, f"is {how}: {held:,} bytes for {shape} numbers", source)
    return torch.frombuffer(data, dtype=torch.uint8, offset=start).view(sizes)


def labelled(
    source: Source, folder: Path | str | None, classes: tuple[str, ...], normalise: Normalise
) -> Split[Images]:
    """MNIST, and what comes in the same files."""
    found = find(source, folder)
    return Split(
        *(
            _part(
                found[f"{name}-images-idx3-ubyte"],
                found[f"{name}-labels-idx1-ubyte"],
                source,
                classes,
                normalise,
            )
            for name in ("train", "t10k")
        )
    )


def _part(
    image_file: Path,
    label_file: Path,
    source: Source,
    classes: tuple[str, ...],
    normalise: Normalise,
) -> Images:
    images, labels = read(image_file, 3, source), read(label_file, 1, source)
    if len(images) != len(labels):
        raise spoilt(label_file, f"has {len(labels):,} labels for {len(images):,} images", source)
    if len(labels) and int(labels.max()) >= len(classes):
        raise spoilt(
            label_file,
            f"has the label {int(labels.max())} but there are {len(classes)} classes",
            source,
        )
    return Images(images.unsqueeze(1), labels.long(), classes, normalise)
