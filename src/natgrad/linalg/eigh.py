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
