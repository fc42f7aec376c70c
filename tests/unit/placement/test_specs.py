import re
from dataclasses import replace

import pytest

from natgrad.errors import SettingError
from natgrad.specs import FactorSpec, Piece
from unit.placement.networks import ekfac, linear, mixed, sharded, tensor_parallel, tied


def test_a_factor_needs_no_more_than_its_sizes():
    assert FactorSpec(3, 1, 6) == FactorSpec(3, 1, 6, diagonal=False, parts=0)


@pytest.mark.parametrize(
    ("box", "numel"), [((), 1), (((2, 5),), 3), (((0, 2), (1, 4)), 6), (((3, 3), (0, 9)), 0)]
)
def test_a_piece_has_the_numbers_of_its_box(box, numel):
    assert Piece(0, box, (0,)).numel == numel


@pytest.mark.parametrize("layout", [sharded, tensor_parallel])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_a_block_has_the_numbers_of_its_parameters_however_they_lie(layout, size):
    whole, cut = mixed(1), mixed(size, layout)
    assert [b.numel for b in whole] == [b.numel for b in cut]


def test_which_factors_are_merged():
    assert linear("a", 3, 2, 1).merged == ()
    assert ekfac("a", 3, 2, 1).merged == ()
    assert tied("a", 3, 2, 1).merged == ("At", "Gt")
    assert tied("a", 3, 2, 1, in_basis=("S",)).merged == ("At", "Gt")


def test_where_a_basis_is_needed():
    assert ekfac("a", 3, 2, 1).basis_everywhere
    assert not tied("a", 3, 2, 1).basis_everywhere


def test_factors_by_name():
    assert linear("a", 3, 2, 1).factor("G").dim == 3


@pytest.mark.parametrize(
    ("decomposed", "in_basis"), [((), ()), (("A", "B"), ()), (("A", "G"), ("S",))]
)
def test_names_of_other_factors(decomposed, in_basis):
    says = (
        f"Block 'a' decomposes {decomposed!r} and has {in_basis!r} in their basis, but its factors "
        "are ['A', 'G']: decompose at least one of these and name no others."
    )
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        replace(linear("a", 3, 2, 1), decomposed=decomposed, in_basis=in_basis)


def test_merged_factors_must_be_together():
    says = (
        "Block 'a' merges ('At', 'Gt') into the factors that are decomposed, which needs all of "
        "them at one rank: pass together=True."
    )
    with pytest.raises(SettingError, match=f"^{re.escape(says)}$"):
        replace(tied("a", 3, 2, 1), together=False)
