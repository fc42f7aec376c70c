"""One Kronecker product for a weight that is used as it is and transposed."""

import pytest
import torch

from natgrad.linalg.forms import Triangle
from natgrad.structures.kronecker import merge_transposed

FORMS = {"A": Triangle(4), "G": Triangle(3), "At": Triangle(4), "Gt": Triangle(3)}


def factors(**scales):
    found = {}
    for name, scale in scales.items():
        form = FORMS[name]
        numbers = torch.zeros(form.numel, dtype=torch.float64)
        form.add_rows(numbers, scale * torch.randn(1, 9, form.dim, dtype=torch.float64))
        found[name] = numbers
    return found


def dense(kept):
    return {name: FORMS[name].dense(one)[0] for name, one in kept.items()}


def traces(a, g):
    return float(a.trace() * g.trace())


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
def test_the_trace_of_the_sum_of_both_is_kept(scale):
    """However the scale of one of them is split between its factors: the result is the same."""
    torch.manual_seed(0)
    kept = factors(A=1.0, G=2.0, At=0.5, Gt=1.5)
    split = {**kept, "At": kept["At"] * scale, "Gt": kept["Gt"] / scale}
    old, new, again = (
        dense(one) for one in (kept, *(merge_transposed(k, FORMS) for k in (kept, split)))
    )
    assert traces(new["A"], new["G"]) == pytest.approx(
        traces(old["A"], old["G"]) + traces(old["At"], old["Gt"])
    )
    for name in "AG":
        torch.testing.assert_close(new[name], again[name])


def test_two_products_with_the_same_inputs_are_added_up_exactly():
    kept = factors(A=1.0, G=2.0, Gt=1.5)
    kept["At"] = 7 * kept["A"]
    new, old = dense(merge_transposed(kept, FORMS)), dense(kept)
    expected = torch.kron(old["G"], old["A"]) + torch.kron(old["Gt"], old["At"])
    torch.testing.assert_close(torch.kron(new["G"], new["A"]), expected)


def test_one_of_them_alone():
    kept = factors(A=1.0, G=2.0)
    assert merge_transposed(kept, FORMS) is kept
    kept = factors(At=1.0, Gt=2.0)
    found = merge_transposed(kept, FORMS)
    assert found["A"] is kept["At"]
    assert found["G"] is kept["Gt"]
