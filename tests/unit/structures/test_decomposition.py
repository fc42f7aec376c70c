"""Factors in the forms in which they are kept: what is decomposed, and how far that lags."""

import pytest
import torch
from torch import nn

from natgrad import KFAC, Cholesky, Kronecker
from natgrad.linalg.forms import BlockTriangle, DiagonalForm, Triangle
from natgrad.structures.decomposition import decompose_factor, factor_error

DAMPING = torch.tensor([0.2], dtype=torch.float64)


def kept(form, seed):
    numbers = torch.zeros(form.numel, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    form.add_rows(numbers, torch.randn(1, 20, form.dim, generator=generator, dtype=torch.float64))
    return numbers / 20


@pytest.mark.parametrize(
    "form",
    [Triangle(8), BlockTriangle(8, 3), BlockTriangle(7, 3), BlockTriangle(6, 2), DiagonalForm(8)],
    ids=lambda form: f"{type(form).__name__} {getattr(form, 'sections', form.dim)}",
)
def test_it_lags_as_far_as_the_whole_matrix(form):
    """``|(F + damping)^-1 (F' + damping) - 1| / sqrt(d)``: in blocks of any sizes as if the zeros
    beside them were written out."""
    old, new = kept(form, 0), kept(form, 1)
    parts = decompose_factor(Cholesky(), form, old, DAMPING)
    eye = DAMPING * torch.eye(form.dim, dtype=torch.float64)
    residual = torch.linalg.solve(form.dense(old)[0] + eye, form.dense(new)[0] + eye)
    residual -= torch.eye(form.dim, dtype=torch.float64)
    expected = float(residual.norm() / form.dim**0.5)
    assert expected > 0.1
    assert factor_error(Cholesky(), form, parts, new, DAMPING) == pytest.approx(expected)
    assert factor_error(Cholesky(), form, parts, old, DAMPING) < 1e-12


@pytest.mark.parametrize("sharing", ["expand", "reduce", "traces"])
def test_what_depends_on_inputs_alone_can_be_shared(sharing):
    """Of a tied head the sides change places. A mean over positions needs the gradient's shape."""
    tied = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    tied[1].weight = tied[0].weight
    for model in (nn.Linear(4, 7), tied):
        (block,) = KFAC(model, kl_clip=None, structure=Kronecker(sharing=sharing)).blocks
        factors = Kronecker(sharing=sharing).factors(block.layers)
        inputs = {name for name, one in factors.items() if one.of_inputs}
        gradients = {name for name, one in factors.items() if one.of_gradients}
        of_inputs = {"A", "Gt"} & set(factors)
        assert inputs == (of_inputs if sharing == "expand" else set())
        assert gradients == (set(factors) if sharing == "traces" else set(factors) - of_inputs)
        assert set(factors) == ({"A", "G", "At", "Gt"} if "Gt" in factors else {"A", "G"})
        assert ("Gt" in factors) == (model is tied and sharing != "traces")
