"""Costs are the measured seconds at measured sizes, and follow straight lines and the cube."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from natgrad import Cholesky, CommOpt, Eigen
from natgrad.errors import SettingError
from natgrad.placement import (
    Cluster,
    Hybrid,
    Kind,
    MeasuredCost,
    Passing,
    SecondsBySize,
    StepModel,
    Workload,
    World,
    simulate,
)
from natgrad.specs import FactorCost, Routine
from unit.placement.networks import diagonal, linear, norm, triangle
from unit.placement.test_cost import costing

FLOPS = 1e9
PRODUCT = SecondsBySize((10, 40), (1e-6, 4e-6), (5e-7, 4e-6))
EIGEN = SecondsBySize((2, 10, 40), (1e-5, 3e-5, 9e-4), (1e-6, 3e-5, 9e-4))
CHOLESKY = SecondsBySize((10, 40), (2e-5, 1e-4), (2e-5, 1e-4))
COST = MeasuredCost(FLOPS, PRODUCT, EIGEN, CHOLESKY)


def test_measured_sizes_take_exactly_what_was_measured():
    assert [PRODUCT.seconds(size) for size in (10, 40)] == [1e-6, 4e-6]
    assert PRODUCT.seconds(10, count=5) == 1e-6 + 4 * 5e-7


def test_between_them_both_axes_are_logarithmic():
    assert PRODUCT.seconds(20) == pytest.approx(2e-6, rel=1e-12)  # the middle of 10 and 40
    assert EIGEN.seconds(20) == pytest.approx(sqrt(3e-5 * 9e-4), rel=1e-12)


def test_above_it_is_the_cube_and_below_only_a_start():
    assert PRODUCT.seconds(80) == pytest.approx(8 * 4e-6, rel=1e-12)
    assert PRODUCT.seconds(1) == PRODUCT.seconds(10) == 1e-6


def test_a_decomposition_takes_its_routine_s_seconds():
    """Times the flops, so that `Cluster.flops` makes seconds of them again."""
    spec = triangle(10, batch=3)
    eigen = replace(spec, cost=Eigen().cost(spec))
    cholesky = replace(spec, cost=Cholesky().cost(spec))
    assert COST.decompose(eigen) == pytest.approx(FLOPS * 3 * 3e-5, rel=1e-12)
    assert COST.decompose(cholesky) == pytest.approx(FLOPS * 3 * 2e-5, rel=1e-12)
    assert COST.decompose(spec) == COST.decompose(eigen)  # without an inverse's word


def test_of_another_one_in_proportion_to_its_operations():
    spec = triangle(10)
    twice = FactorCost(2 * Routine.EIGEN.operations(10), 1.0, Routine.EIGEN)
    assert COST.decompose(replace(spec, cost=twice)) == pytest.approx(FLOPS * 6e-5, rel=1e-12)
    nothing_said = FactorCost(3 * Routine.PRODUCT.operations(10), 1.0)
    assert COST.decompose(replace(spec, cost=nothing_said)) == pytest.approx(
        FLOPS * 3e-6, rel=1e-12
    )


def test_diagonals_take_an_operation_a_number():
    spec = diagonal(10, batch=3)
    assert COST.decompose(replace(spec, cost=Cholesky().cost(spec))) == 30


@pytest.mark.parametrize(("inverse", "products"), [(Eigen(), 2), (Cholesky(), 1)], ids=repr)
def test_preconditioning_takes_the_products(inverse, products):
    square = costing(linear("a", 40, 40, 1, bias=False), inverse)
    assert COST.precondition(square) == pytest.approx(FLOPS * 2 * products * 4e-6, rel=1e-12)
    # [5, 5] [5, 320] and [5, 320] [320, 320] as squares of (5 5 320)^(1/3) = 20 and 80 rows
    wide = costing(linear("a", 5, 320, 1, bias=False), inverse)
    assert COST.precondition(wide) == pytest.approx(FLOPS * products * (2e-6 + 32e-6), rel=1e-12)


def test_many_tiny_ones_are_one_call():
    block = costing(norm("a", 64, 1), Cholesky())
    assert COST.precondition(block) == pytest.approx(FLOPS * (1e-6 + 63 * 5e-7), rel=1e-12)
    (_, spec), *_ = costing(norm("a", 64, 1), Eigen()).factors
    assert COST.decompose(spec) == pytest.approx(FLOPS * (1e-5 + 63 * 1e-6), rel=1e-12)


def test_a_simulation_takes_the_measured_seconds():
    block = costing(linear("a", 40, 40, 1, bias=False), Eigen())
    plan = CommOpt(cost=COST)([block], World(1))
    times = simulate(plan, Cluster(flops=FLOPS), COST)
    assert max(times.refresh) == pytest.approx(2 * 9e-4, rel=1e-12)
    assert max(times.apply) == pytest.approx(4 * 4e-6, rel=1e-12)


def test_gradients_and_factors_pass_through_memory():
    """Beside products: 7 µs for a block and 3 ns for each number of its gradient; 5 µs for a factor
    and 2 ns for each of its numbers, where it is kept."""
    cost = replace(COST, carried=Passing(7e-6, 3e-9), folded=Passing(5e-6, 2e-9))
    block = costing(linear("a", 40, 40, 1, bias=False), Eigen())
    more = (cost.precondition(block) - COST.precondition(block)) / FLOPS
    assert more == pytest.approx(7e-6 + 1600 * 3e-9)
    times = simulate(CommOpt(cost=cost)([block], World(1)), Cluster(flops=FLOPS), cost)
    folded = 2 * (5e-6 + 820 * 2e-9)
    assert max(times.update) == times.stages.fold == pytest.approx(folded)
    assert times.stages.reduce == 0
    # On two ranks each folds what it keeps, after the messages.
    blocks = [costing(linear(name, 40, 40, 2, bias=False), Eigen()) for name in "ab"]
    plan = Hybrid(0.5, cost=cost)(blocks, World(2))
    alone, both = (simulate(plan, Cluster(flops=FLOPS), one) for one in (COST, cost))
    assert np.subtract(both.update, alone.update) == pytest.approx([folded] * 2)
    assert alone.stages.fold == 0
    # And so in a training step that updates.
    work = Workload(3200, 1e6, 2e6, 1e6, 8.0)
    steps = StepModel(plan, both, work, Cluster(flops=FLOPS), cost)
    assert steps.step(Kind.UPDATE).stages()["fold"] == pytest.approx(folded)
    assert "fold" not in steps.step(Kind.STALE).stages()


@pytest.mark.parametrize("name", ["start", "each"])
def test_nothing_takes_less_than_no_time(name):
    with pytest.raises(SettingError, match=f"Passing.{name} is -1.0 but must be finite and at lea"):
        Passing(**{name: -1.0})


@pytest.mark.parametrize(
    ("sizes", "first", "further"),
    [((), (), ()), ((2, 1), (1.0, 2.0), (1.0, 2.0)), ((1, 2), (1.0,), (1.0, 2.0))],
)
def test_a_table_that_is_none(sizes, first, further):
    with pytest.raises(SettingError) as error:
        SecondsBySize(sizes, first, further)
    assert str(error.value) == (
        f"SecondsBySize has sizes {sizes!r} with {len(first)} and {len(further)} numbers of "
        "seconds but must have at least one size, in increasing order, and two numbers for each: "
        "pass such tuples."
    )


def test_impossible_numbers():
    with pytest.raises(SettingError) as error:
        SecondsBySize((1,), (0.0,), (1.0,))
    assert str(error.value) == (
        "SecondsBySize.first is 0.0 but must be finite and above 0: pass such a number."
    )
    with pytest.raises(SettingError) as error:
        SecondsBySize((0,), (1.0,), (1.0,))
    assert str(error.value) == (
        "SecondsBySize.sizes is 0 but must be a whole number of at least 1: pass such an int."
    )
    with pytest.raises(SettingError) as error:
        MeasuredCost(-1.0, PRODUCT, EIGEN, CHOLESKY)
    assert str(error.value) == (
        "MeasuredCost.flops is -1.0 but must be finite and above 0: pass such a number."
    )
