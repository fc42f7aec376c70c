"""What the tests of the applications share: scripts that run here, and tiny data of their kinds."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = (
    "cifar_resnet",
    "imagenet_folder",
    "unet_membrane",
    "gpt_shakespeare",
    "digits_autoencoder",
)
RECORDS = 10_000  # of one of CIFAR-10's files


def here(monkeypatch):
    """As if the examples' folder were that of the script; its module is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "application", None)
    del sys.modules["application"]


def command(name, *options, monkeypatch):
    """What the script ends with."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code


def series(printed, what):
    """Numbers after a word, one a line."""
    return [float(found) for found in re.findall(rf"\b{what} ([\d.]+)", printed)]


def says_what_kfac_did(printed):
    said = re.search(
        r"^K-FAC took (\d+)% of the time of a step\. In their last update its factors moved by "
        r"([\d.]+)% \(A\) and ([\d.]+)% \(G\), the median over layers\.$",
        printed,
        re.MULTILINE,
    )
    return said is not None and all(float(number) > 0 for number in said.groups())


def saved(folder):
    """The state in the one checkpoint there is."""
    (found,) = folder.glob("step-*")
    return torch.load(found / "state.pt", weights_only=True)


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


def write_cifar(folder):
    """Files of the right size whose first images are stripes: those of a class have one direction,
    width and colour. All others are holes in the files, which take no room and read as zeros."""
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{part}.bin" for part in range(1, 6)), "test_batch.bin"):
        with (folder / name).open("wb") as file:
            for label in np.arange(100) % 10:
                waves = np.sin(np.arange(32) * (1.5 if label < 6 else 0.5))
                stripes = waves[:, None] if label % 2 else waves[None, :]
                image = np.full((3, 32, 32), 128.0) + draw.normal(0, 10, (3, 32, 32))
                image[label // 2 % 3] += 60 * stripes
                file.write(bytes([label]) + image.clip(0, 255).astype(np.uint8).tobytes())
            file.truncate(RECORDS * 3073)


def write_pictures(folder):
    """Photographs, as it were, of two kinds: those of the first are lighter at the bottom."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8)):
        for name, sign in (("one", 1), ("other", -1)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                slope = 128 + sign * np.linspace(-80, 80, 40)[:, None, None]
                pixels = (slope + draw.normal(0, 15, (40, 48, 3))).clip(0, 255).astype(np.uint8)
                image.fromarray(pixels).save(folder / part / name / f"{number}.jpg")


def write_cells(folder):
    """Light cells with dark walls between them, and noise."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for name in ("image", "label"):
        (folder / name).mkdir()
    for number in range(15):
        wall = np.zeros((64, 64), bool)
        for start in range(int(draw.integers(4, 12)), 62, 14):
            wall[start : start + 3] = True
            wall[:, start : start + 3] = True
        gray = np.where(wall, 70, 160) + draw.normal(0, 20, wall.shape)
        image.fromarray(gray.clip(0, 255).astype(np.uint8)).save(folder / f"image/{number}.png")
        image.fromarray(np.where(wall, 0, 255).astype(np.uint8)).save(
            folder / f"label/{number}.png"
        )
