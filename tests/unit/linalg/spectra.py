"""Dense float64 matrices with chosen eigenvalues, of which solvers are given the product only."""

import pytest
import torch


class Known:
    """``A [n, n]`` with given eigenvalues and random eigenvectors; counts its products."""

    def __init__(self, eigenvalues, seed=0):
        values = torch.as_tensor(eigenvalues, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        n = len(values)
        q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        dense = (q * values) @ q.T
        self.dense, self.n, self.columns = (dense + dense.T) / 2, n, 0
        self.eigenvalues = values.sort(descending=True).values
        self.scale = max(float(values.abs().max()), 1e-300)

    def __call__(self, x):
        assert x.dim() == 2
        assert x.shape[0] == self.n
        self.columns += x.shape[1]
        return (self.dense @ x.double()).to(x.dtype)


def decaying(n, rate=0.9):
    return rate ** torch.arange(n, dtype=torch.float64)


def spread(n, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64)


def repeated(*pairs):
    """Each value as often as told."""
    return torch.cat([torch.full((count,), float(value)) for value, count in pairs]).double()


SPECTRA = {
    "indefinite": spread(80),
    "decaying": decaying(80),
    "clustered": torch.cat([1 + 1e-4 * spread(12), 0.5 + 1e-5 * spread(20, 4), 0.1 * spread(60)]),
    "double": torch.tensor([5, 5, 4, 4, 3, 3, 2]).double(),
    "multiple": torch.cat([repeated((5, 1), (4, 3), (3, 2), (-5, 4)), 0.3 * spread(60)]),
    "all equal": repeated((2.5, 30)),
    "two values": repeated((1, 20), (-1, 20)),
    "rank 3": torch.cat([torch.tensor([3.0, 2.0, -2.0]).double(), torch.zeros(50).double()]),
    "zero": torch.zeros(20).double(),
    "one number": torch.tensor([-0.7]).double(),
    "two numbers": torch.tensor([-0.7, 0.2]).double(),
    "huge": 1e12 * spread(40),
    "tiny": 1e-12 * spread(40),
}
each_spectrum = pytest.mark.parametrize("name", SPECTRA)


def check_pairs(found, known, k, smallest, tolerance):
    """Values, vectors and residuals are those of the dense matrix, and the stated ones are true."""
    k = min(k, known.n)
    expected = known.eigenvalues[-k:] if smallest else known.eigenvalues[:k]
    assert found.converged, found
    assert found.values.shape == (k,)
    assert found.vectors.shape == (known.n, k)
    assert (found.values - expected).abs().max() <= tolerance * known.scale
    eye = torch.eye(k, dtype=torch.float64)
    assert (found.vectors.T @ found.vectors - eye).abs().max() <= 1e-10
    rest = (known.dense @ found.vectors - found.vectors * found.values).norm(dim=0) / known.scale
    # The largest eigenvalue that was met may be smaller than the largest there is.
    assert (rest <= found.residuals + 1e-12).all()
    assert found.residuals.max() <= tolerance
    assert found.products == known.columns
