"""What must hold for a matrix to exist: each failure is one sentence."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from natgrad.curvature.losses import Loss, OwnLoss
from natgrad.errors import SettingError
from natgrad.operators.data import Batch

LARGEST = 2**31  # bytes of a dense matrix that is made without being asked twice


def model(given: object) -> None:
    """Refuse what is no module, and modules that mix samples or drop inputs at random.

    Arguments:
        given: what the user gave.
    """
    if not isinstance(given, nn.Module):
        raise SettingError(
            f"model is an object of type {type(given).__name__} but must be a torch.nn.Module: "
            "give the module itself."
        )
    for name, module in given.named_modules():
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            raise SettingError(
                f"{type(module).__name__} {name!r} has no running statistics, so that it always "
                "mixes the samples of a batch: give it track_running_stats=True, or take a norm "
                "layer of single samples."
            )
        if not module.training:
            continue
        random = isinstance(module, _DropoutNd) and module.p > 0
        if random or isinstance(module, _BatchNorm):
            why = "drops inputs at random" if random else "mixes the samples of a batch"
            raise SettingError(
                f"{type(module).__name__} {name!r} is in training mode, in which it {why}, so "
                "there is no loss of a single sample: call model.eval() first."
            )


def deterministic(given: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Refuse a model whose output changes from call to call.

    Arguments:
        given: the model.
        outputs: of two calls with the same batch.
    """
    one, two = outputs
    if not torch.allclose(one, two, rtol=1e-5, atol=1e-7, equal_nan=True):
        apart = float((one - two).abs().max())
        raise SettingError(
            f"{type(given).__name__} gave two outputs for one batch that are {apart:.3g} apart, so "
            "its matrices are not defined: call model.eval(), or take away what is random in it."
        )


@torch.no_grad()
def mean(loss: Loss, output: Tensor, batch: Batch) -> None:
    """Refuse a loss that is random, or whose value for a few samples is not the mean of their
    single losses.

    Arguments:
        loss: of the problem; only an `OwnLoss` is tested, as the others are known to be means.
        output: of the model for a batch, ``[n, …]``.
        batch: that the output is of.
    """
    if not isinstance(loss, OwnLoss) or not isinstance(batch.targets, Tensor):
        return
    few = min(8, batch.samples)
    f, targets = output[:few], batch.targets[:few]
    together, again = (float(loss.total(f, targets)) / few for _ in range(2))
    if not _equal(together, again):
        raise SettingError(
            f"The loss gave {together:.6g} and then {again:.6g} for the same outputs, so its "
            "matrices are not defined: take away what is random in it."
        )
    if few == 1:  # a sum and a mean are the same then
        f, targets, few = torch.cat([f] * 2), torch.cat([targets] * 2), 2
        together = float(loss.total(f, targets)) / few
    apart = float(loss.sample_totals(f, targets).sum()) / few
    if not _equal(together, apart):
        raise SettingError(
            f"The loss of {few} samples is {together:.6g} but the mean of their single losses is "
            f"{apart:.6g}, so it is no mean over samples: divide by their number, and give "
            "weighted or ignored targets to natgrad.curvature.CrossEntropy."
        )


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * max(abs(one), abs(other), 1e-12) or one != one


def precision(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """The one floating-point type of all parameters, float32 or float64; others and mixtures raise.

    Arguments:
        parameters: tensors by name.
    """
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})
    if kinds not in (["float32"], ["float64"]):
        raise SettingError(
            f"The parameters are {' and '.join(kinds)} but must all be float32 or all float64, as "
            "matrices are added up and decomposed: call model.float() or model.double()."
        )
    return next(iter(parameters.values())).dtype


def fits(rows: int, columns: int, dtype: torch.dtype, what: str, instead: str) -> None:
    """Refuse a dense matrix above 2 GiB.

    Arguments:
        rows: of the matrix.
        columns: of the matrix.
        dtype: of its entries, for their size in bytes.
        what: name of the matrix, for the error sentence.
        instead: what to use instead, at the end of that sentence.
    """
    size = rows * columns * dtype.itemsize
    if size > LARGEST:
        raise SettingError(
            f"{what} has {rows:,} x {columns:,} entries, {size / 2**30:,.1f} GiB, above the limit "
            f"of {LARGEST / 2**30:.0f} GiB: {instead}."
        )
