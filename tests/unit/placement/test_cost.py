from dataclasses import replace

import pytest

from natgrad import Cholesky, Eigen
from natgrad.placement import Flops
from unit.placement.networks import diagonal, linear, norm, tied, triangle


def costing(block, inverse):
    """The block with the costs that an inverse states for its factors."""
    specs = tuple((name, replace(spec, cost=inverse.cost(spec))) for name, spec in block.factors)
    return replace(block, factors=specs)


@pytest.mark.parametrize(("inverse", "coefficient"), [(Eigen(), 25), (Cholesky(), 2)], ids=repr)
def test_decomposing_takes_the_cube(inverse, coefficient):
    spec = triangle(10, batch=3)
    assert Flops().decompose(replace(spec, cost=inverse.cost(spec))) == coefficient * 3 * 1000


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
def test_decomposing_a_diagonal_takes_one_operation_per_number(inverse):
    spec = diagonal(10, batch=3)
    assert Flops().decompose(replace(spec, cost=inverse.cost(spec))) == 30


@pytest.mark.parametrize(("inverse", "products"), [(Eigen(), 2), (Cholesky(), 1)], ids=repr)
def test_preconditioning_takes_two_sided_products(inverse, products):
    m, n = 5, 7
    block = costing(linear("a", m, n, 1, bias=False), inverse)
    assert Flops().precondition(block) == products * 2 * m * n * (m + n)


def test_preconditioning_with_a_diagonal_factor_takes_one_product():
    words, width = 50, 8
    block = costing(tied("a", words, width, 1), Cholesky())  # merged factors are not applied
    assert Flops().precondition(block) == words * width * (2 * width + 1)


def test_preconditioning_units_takes_small_products():
    assert Flops().precondition(costing(norm("a", 10, 1), Cholesky())) == 20 * 2 * 2


def test_without_an_inverse_s_word_it_is_an_eigendecomposition():
    for spec in (triangle(10, batch=3), diagonal(10, batch=3)):
        assert spec.work == Eigen().cost(spec)
