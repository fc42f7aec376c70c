"""The mean image on several processes: each image is read by one of them, and all have the same."""

import os
from unittest.mock import patch

import pytest
import torch

from natgrad.comm import connect
from natgrad.errors import DataError
from natgrad.lab.data import image_files
from natgrad.lab.train.training import Training
from unit.lab.data.image_fixtures import cut, draw, noise
from unit.lab.train import digit_runs as runs

pytestmark = pytest.mark.distributed


@pytest.fixture
def folder(tmp_path):
    for number in range(7):
        draw(tmp_path / f"train/cat/{number}.png", noise(20, 30, seed=number))
    draw(tmp_path / "val/cat/x.png", noise(20, 30))
    return tmp_path


def prepared(folder):
    """On each of the ranks, with a cache of its own: the mean image, and what was read for it."""
    comm, read, opened = connect(), [], image_files.opened

    def noticed(path, mode):
        read.append(path.name)
        return opened(path, mode)

    values = {"data": "imagenet", "folder": str(folder), "image": 8, "network": "resnet18"}
    values |= {"mixup": 0.0, "erasing": 0.0, "batch_size": 4, "kfac": False, "mean_image": True}
    own = patch.dict(os.environ, {"NATGRAD_CACHE": str(folder / f"cache-{comm.rank}")})
    with own, patch.object(image_files, "opened", noticed):
        try:
            run = Training(runs.settings(**values), comm, torch.device("cpu"))
        except DataError as error:
            return str(error), read
    return run.task.train.normalise.mean, read


def test_each_image_is_read_once(world, folder):
    (alone, _) = prepared(folder)
    for file in (folder / "cache-0/mean-images").iterdir():
        file.unlink()
    found = world.run(prepared, folder, ranks=2)
    assert all(torch.equal(mean, alone) for mean, _ in found)
    assert sorted(name for _, read in found for name in read) == [f"{n}.png" for n in range(7)]
    assert not (folder / "cache-1").exists()
    again = world.run(prepared, folder, ranks=2)
    assert all(torch.equal(mean, alone) and not read for mean, read in again)


def test_a_spoilt_image_is_told_by_all(world, folder):
    cut(folder / "train/cat/3.png", 500)
    said = [text for text, _ in world.run(prepared, folder, ranks=2)]
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1: {folder / 'train/cat/3.png'} is no image or is corrupt (")
