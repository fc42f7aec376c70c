"""What must hold for a matrix to exist: each failure is one sentence."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from natgrad.curvature.losses import Loss, OwnLoss
from natgrad.errors import SettingError
from natgrad.operators.data import Batch

LARGEST = 2**31  # bytes of a dense matrix that is made without being asked twice


def model(given: object) -> None:
    if not isinstance(given, nn.Module):
        raise SettingError(
            f"model is an object of type {type(given).__name__} but must be a torch.nn.Module: "
            "give the module itself."
        )
    for name, module in given.named_modules():
        if not module.training:
            continue
        random = isinstance(module, _DropoutNd) and module.p > 0
        shared = isinstance(module, _BatchNorm) and module.track_running_stats
        if random or shared:
            why = "drops inputs at random" if random else "mixes the samples of a batch"
            raise SettingError(
                f"{type(module).__name__} {name!r} is in training mode, in which it {why}, so "
                "there is no loss of a single sample: call model.eval() first."
            )


def deterministic(given: nn.Module, outputs: Sequence[Tensor]) -> None:
    one, two = outputs
    if not torch.allclose(one, two, rtol=1e-5, atol=1e-7, equal_nan=True):
        apart = float((one - two).abs().max())
        raise SettingError(
            f"{type(given).__name__} gave two outputs for one batch that are {apart:.3g} apart, so "
            "its matrices are not defined: call model.eval(), or take away what is random in it."
        )


@torch.no_grad()
def mean(loss: Loss, output: Tensor, batch: Batch) -> None:
    """A batch with every sample twice must have the same mean loss."""
    if not isinstance(loss, OwnLoss) or not isinstance(batch.targets, Tensor):
        return
    targets = batch.targets
    once = float(loss.total(output, targets)) / batch.samples
    twice = float(loss.total(torch.cat([output] * 2), torch.cat([targets] * 2)))
    twice /= 2 * batch.samples
    if abs(twice - once) > 1e-4 * max(abs(once), abs(twice), 1e-12):
        raise SettingError(
            f"The loss is {once:.6g} on a batch and {twice:.6g} on the same batch with every "
            "sample twice, so it is no mean over samples: divide by their number "
            '(reduction="mean").'
        )


def fits(rows: int, columns: int, dtype: torch.dtype, what: str, instead: str) -> None:
    """Whether a dense matrix may be made."""
    size = rows * columns * dtype.itemsize
    if size > LARGEST:
        raise SettingError(
            f"{what} has {rows:,} x {columns:,} entries, {size / 2**30:,.1f} GiB, above the limit "
            f"of {LARGEST / 2**30:.0f} GiB: {instead}."
        )
