"""Stacks of products: one call or many, and the same numbers."""

import pytest
import torch

from natgrad.linalg import products


@pytest.fixture
def calls(monkeypatch):
    """Names of the products that torch was asked for."""
    made = []
    for name in ("mm", "bmm"):
        own = getattr(torch, name)

        def call(*args, own=own, name=name, **kwargs):
            made.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(torch, name, call)
    return made


@pytest.mark.parametrize(
    ("shape", "threads", "expected"),
    [
        ((1, 8, 8, 8), 2, ["mm"]),
        ((3, 8, 8, 8), 2, ["bmm"]),  # small ones, however many
        ((4, 300, 400, 400), 2, ["bmm"]),
        ((3, 700, 300, 300), 2, ["mm"] * 3),  # one of two threads would wait for the third
        ((2, 900, 300, 300), 2, ["mm"] * 2),  # tall enough for both
        ((2, 300, 400, 400), 8, ["mm"] * 2),  # six of eight would wait
    ],
    ids=str,
)
def test_a_batch_where_it_keeps_all_threads_busy(monkeypatch, calls, shape, threads, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    b, m, k, n = shape
    left, right = torch.randn(b, m, k), torch.randn(b, k, n)
    out = torch.empty(b, m, n)
    assert products.product(left, right, out) is out
    assert calls == expected
    torch.testing.assert_close(out, left @ right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sides", ["both", "left", "right", "none"])
def test_an_empty_side_is_the_identity(sides):
    left, m, right = (torch.randn(2, *s, dtype=torch.float64) for s in ((3, 3), (3, 4), (4, 4)))
    empty = m.new_empty(0)
    g = left if sides in ("both", "left") else empty
    a = right if sides in ("both", "right") else empty
    expected = m
    if g is left:
        expected = left @ expected
    if a is right:
        expected = expected @ right
    found = products.two_sided(g, m, a, torch.empty_like(m))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
