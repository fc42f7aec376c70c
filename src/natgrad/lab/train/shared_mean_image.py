"""The mean image (Osawa 2019, sec. 4.1): each training image is read once, by one of the ranks."""

from dataclasses import replace

import torch
from torch import Tensor

from natgrad.comm import Communicator
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.lab.data import ImageFolder, Normalise, Part, Rows, Squeeze
from natgrad.lab.data.mean_image import Corners
from natgrad.lab.train.tasks import Task


def centred(task: Task, comm: Communicator, device: torch.device) -> Task:
    """With the mean image subtracted, if the settings ask for it; on all ranks alike."""
    if not task.settings.mean_image:
        return task
    folder = _folder(task.train)
    assert isinstance(folder.crop, Squeeze)
    mean = _mean(Corners(folder, folder.crop), task.settings.workers, comm, device)
    by = Normalise(mean, (1.0, 1.0, 1.0))
    fit = None if task.fit is None else _normalised(task.fit, by)
    return replace(
        task, train=_normalised(task.train, by), test=_normalised(task.test, by), fit=fit
    )


def _mean(corners: Corners, workers: int, comm: Communicator, device: torch.device) -> Tensor:
    """``[3, size, size]``"""
    # Caches may differ between machines: that of the first rank counts.
    kept = corners.kept() if comm.rank == 0 else None
    known = comm.gather(kept is not None)[0]
    if known:
        own = torch.zeros(corners.shape, dtype=torch.int64) if kept is None else kept
    else:
        own = raise_on_all_ranks(comm, lambda: corners.total(comm.rank, comm.size, workers))
    total = comm.total(own.flatten().to(device), "mean image").wait().view(corners.shape).cpu()
    if comm.rank == 0 and not known:
        corners.keep(total)
    return corners.mean(total)


def _folder(rows: Rows) -> ImageFolder:
    while isinstance(rows, Part):
        rows = rows.whole
    assert isinstance(rows, ImageFolder)
    return rows


def _normalised(rows: Rows, by: Normalise) -> Rows:
    if isinstance(rows, Part):
        return Part(_normalised(rows.whole, by), rows.rows)
    return _folder(rows).normalised(by)
