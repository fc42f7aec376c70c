"""What the applications share: lines on how it goes, checkpoints, pictures, errors as sentences."""

import math
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from natgrad.comm import Communicator
from natgrad.lab.data import Loader
from natgrad.tables import seconds_text

QUIET = 30.0  # seconds between two lines, if there is nothing new but steps


def told(main: Callable[[], object]) -> None:
    """Run it; what natgrad has to object to is one sentence and no traceback."""
    try:
        main()
    except natgrad.NatgradError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


class Progress:
    """A line for every test and, in between, every half minute, on the first rank alone: the mean
    loss and seconds of a step since the last test. The test itself does not count."""

    def __init__(self, start: int, steps: int, rank: int = 0) -> None:
        self.done, self.steps, self.first = start, steps, rank == 0
        self.seconds = 0.0  # of all steps
        self.mark = self.said = perf_counter()
        self._new: list[tuple[Tensor, float]] = []

    def step(self, loss: Tensor) -> None:
        now = perf_counter()
        self._new.append((loss.detach(), now - self.mark))
        self.done, self.seconds = self.done + 1, self.seconds + now - self.mark
        self.mark = now
        if now - self.said > QUIET:
            self._say()

    def tested(self, found: str) -> None:
        """``found`` is what the test says."""
        self._say(f"{found}, ")
        self.mark, self._new = perf_counter(), []

    def _say(self, found: str = "") -> None:
        losses, seconds = zip(*self._new, strict=True)
        loss, each = float(torch.stack(losses).mean()), statistics.mean(seconds)
        if not math.isfinite(loss):
            sys.exit(f"The loss is {loss} at step {self.done}: pass a smaller --lr.")
        if self.first:
            where, text = f"step {self.done:,} of {self.steps:,}", f"{seconds_text(each)} a step"
            print(f"{where}: loss {loss:.4g}, {found}{text}", flush=True)
        self.said = perf_counter()

    def end(self, kfac: natgrad.KFAC | None) -> None:
        """What K-FAC did. Of several ranks all must ask: each knows the layers that it keeps."""
        if not self.seconds and self.first:
            print(f"step {self.done:,} of {self.steps:,}: there is nothing left to do.")
        if kfac is None or not self.seconds:
            return
        share = sum(kfac.timings().seconds.values()) / self.seconds
        changes = {
            key: x for one in kfac.comm.gather(kfac.drift().change) for key, x in one.items()
        }
        median = {n: statistics.median(x for (_, m), x in changes.items() if m == n) for n in "AG"}
        if self.first:
            print(
                f"K-FAC took {share:.0%} of the time of a step. In their last update its factors "
                f"moved by {median['A']:.1%} (A) and {median['G']:.1%} (G), the median over layers."
            )


@torch.no_grad()
def accuracy(model: nn.Module, batches: Loader, comm: Communicator) -> float:
    """Each rank judges its share. DDP, if there is one around the model, gives all of them the
    averages of batch norm that the first one has, which are those that are saved."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    model.train()
    total = comm.total(right.sum().reshape(1), "right").wait()
    return int(total) / batches.sampling.samples


def save(folder: Path, comm: Communicator, step: int, state: Any, own: Any = None) -> None:
    """``state`` is the same on all ranks, ``own`` what else each of them has. What was saved before
    goes only when all of it is written, so that a run may be killed at any time."""
    new = folder / "unfinished"
    new.mkdir(parents=True, exist_ok=True)
    if own is not None:
        torch.save(own, new / f"rank-{comm.rank}.pt")
    if comm.rank == 0:
        torch.save({"step": step, **state}, new / "state.pt")
    comm.gather("written")
    if comm.rank == 0:
        before = list(folder.glob("step-*"))
        new.rename(folder / f"step-{step:08d}")
        for one in before:
            shutil.rmtree(one)
    comm.gather("renamed")


def load(folder: Path, comm: Communicator, *, resume: bool) -> tuple[dict[str, Any], Any] | None:
    """``state`` and ``own`` of the run in ``folder``; nothing for one that begins."""
    if comm.rank == 0:
        shutil.rmtree(folder / "unfinished", ignore_errors=True)  # of a run that was killed
    found = sorted(folder.glob("step-*"))
    if bool(found) != resume:
        what = "no run to go on with: leave out" if resume else "a run already: go on with it by"
        raise natgrad.errors.CheckpointError(
            f"{folder} has {what} --resume, or pass another --out."
        )
    if not found:
        return None
    ranks = len(list(found[-1].glob("rank-*.pt")))
    if ranks not in (0, comm.size):
        raise natgrad.errors.CheckpointError(
            f"The run in {folder} has {ranks} processes but there are {comm.size}: start as many."
        )
    state = torch.load(found[-1] / "state.pt", "cpu", weights_only=True)
    own = found[-1] / f"rank-{comm.rank}.pt"
    return state, torch.load(own, "cpu", weights_only=True) if ranks else None


class Picture:
    """Rows of gray images and their names, as a PNG; made before training, when it is still time to
    install what is missing."""

    MARGIN, GAP = 64, 4  # pixels, for the names and between images

    def __init__(self, path: Path) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise natgrad.errors.SettingError(
                f"{path} is drawn by Pillow, which is not installed: pip install 'natgrad[data]'."
            ) from None
        self.path, self.sheet, self.pen = path, Image.fromarray, ImageDraw.Draw

    def draw(self, rows: Mapping[str, Tensor], scale: int = 1) -> None:
        """``rows`` of ``[n, h, w]`` from 0 to 1, each pixel ``scale`` pixels wide."""
        pixels = torch.stack(list(rows.values())).clamp(0, 1).mul(255).round().byte().cpu()
        pixels = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        pixels = F.pad(pixels, (0, self.GAP, 0, self.GAP), value=255).permute(0, 2, 1, 3)
        height = pixels.shape[1]
        pixels = F.pad(pixels.flatten(2).flatten(0, 1), (self.MARGIN, 0, 0, 0), value=255)
        sheet = self.sheet(pixels.numpy())
        for i, name in enumerate(rows):
            self.pen(sheet).text((self.GAP, i * height + height // 2), name, fill=0, anchor="lm")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(self.path)
        print(f"{', '.join(rows)} are in {self.path}.")
