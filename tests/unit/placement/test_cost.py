import re

import pytest

from natgrad.errors import SettingError
from natgrad.placement import Flops
from unit.placement.networks import diagonal, linear, norm, tied, triangle


@pytest.mark.parametrize(("joint", "coefficient"), [(True, 25), (False, 2)])
def test_decomposing_takes_the_cube(joint, coefficient):
    assert Flops().decompose(triangle(10, batch=3), joint) == coefficient * 3 * 1000


def test_decomposing_a_diagonal_takes_one_operation_per_number():
    assert Flops().decompose(diagonal(10, batch=3), joint=True) == 30


@pytest.mark.parametrize(("joint", "products"), [(True, 2), (False, 1)])
def test_preconditioning_takes_two_sided_products(joint, products):
    m, n = 5, 7
    assert Flops().precondition(linear("a", m, n, 1, bias=False), joint) == (
        products * 2 * m * n * (m + n)
    )


def test_preconditioning_with_a_diagonal_factor_takes_one_product():
    words, width = 50, 8
    block = tied("a", words, width, 1)  # merged factors are not applied
    assert Flops().precondition(block, joint=False) == words * width * (2 * width + 1)


def test_preconditioning_units_takes_small_products():
    assert Flops().precondition(norm("a", 10, 1), joint=False) == 20 * 2 * 2


def test_coefficients_may_be_measured():
    assert Flops(eigen=9, cholesky=1).decompose(triangle(2), joint=True) == 72


@pytest.mark.parametrize("name", ["eigen", "cholesky"])
def test_coefficients_are_positive(name):
    says = f"Flops.{name} is 0 but must be finite and above 0: pass such a number."
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        Flops(**{name: 0})
