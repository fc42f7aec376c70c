"""Image files for tests, where Pillow is installed."""

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def draw(path, numbers, **options):
    """``[h, w]`` or ``[h, w, 3]`` of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(numbers, np.uint8)).save(path, **options)
    return path


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def cut(path, count):
    """All but the last ``count`` bytes."""
    path.write_bytes(path.read_bytes()[:-count])
