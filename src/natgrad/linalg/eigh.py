"""Eigendecompositions of a batch of symmetric matrices, the fast way for their size.

Up to 32 columns one batched call is fastest, as LAPACK costs more to start than to run. Larger ones
go one by one; several blocks at a time are the business of `natgrad.linalg.threads`.
"""

import torch
from torch import Tensor

# Up to this size LAPACK's calls cost more to start than to do, so one call takes the whole batch.
_TINY = 32


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[b, d]`` and eigenvectors as rows ``Q^T [b, d, d]`` of ``matrix [b, d, d]``, of
    which only the upper triangle is read. Raises ``torch.linalg.LinAlgError``.

    One matrix at a time: a batched call is slower than a loop for anything but tiny ones.
    """
    if matrix.shape[1] <= _TINY:
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")
        return values, vectors.mT.contiguous()
    pairs = [torch.linalg.eigh(one, UPLO="U") for one in matrix]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1].mT for pair in pairs])


def settle_null_spaces(values: Tensor, rows: Tensor) -> None:
    """Make eigenvectors of eigenvalue 0 depend on their space alone, in place.

    Any basis of that space is as good as another, and rounding decides which one is found: another
    order of summation finds another one. What is measured along each vector (EKFAC's ``S``) would
    then differ by more than rounding between one process and several. Of all bases the one is taken
    in which a fixed matrix with distinct eigenvalues, ``diag(1, ..., 2)``, is diagonal.

    Arguments:
        values: ``[b, d]``, eigenvalues in any order, none of them negative.
        rows: ``[b, d, d]``, an eigenvector a row.
    """
    dim = rows.shape[1]
    zero = values <= values.amax(1, keepdim=True) * (dim * torch.finfo(values.dtype).eps)
    weights = torch.linspace(1.0, 2.0, dim, dtype=rows.dtype, device=rows.device)
    for vectors, of_null_space in zip(rows, zero, strict=True):
        count = int(of_null_space.sum())
        if count < 2:
            continue
        first = bool(of_null_space[:count].all())  # as LAPACK has them: then a view will do
        null = vectors[:count] if first else vectors[of_null_space]
        projected = (null * weights) @ null.mT
        _, turned = torch.linalg.eigh(projected)
        del projected  # no more is allocated at a time than for the decomposition itself
        null.copy_(turned.mT @ null)
        if not first:
            vectors[of_null_space] = null
