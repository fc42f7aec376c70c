"""The sizes of a Llama, and what its positions do."""

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.models.llama import (
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    GroupedAttention,
    Llama,
    LlamaSize,
    rotated,
)

SMALL = LlamaSize(layers=2, width=16, heads=4, key_heads=2, hidden=24)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [(LLAMA_7B, 6_738_415_616), (LLAMA_13B, 13_015_864_320), (LLAMA_70B, 68_976_648_192)],
)
def test_parameters(size, parameters):
    with torch.device("meta"):
        model = Llama(size)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_no_position_sees_a_later_one():
    torch.manual_seed(0)
    model = Llama(SMALL, vocabulary=11)
    tokens = torch.randint(11, (2, 6))
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % 11
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_products_of_turned_vectors_depend_on_distance_alone():
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, dtype=torch.float64)
    xs, ys = (rotated(one.expand(1, 1, 9, 8))[0, 0] for one in (x, y))
    torch.testing.assert_close(xs[5] @ ys[2], xs[8] @ ys[5], rtol=1e-6, atol=1e-6)
    assert not torch.isclose(xs[5] @ ys[2], xs[5] @ ys[1])


def test_grouped_keys_are_repeated_ones():
    """As many key heads as heads, with each weight written twice, give the same."""
    torch.manual_seed(0)
    few = GroupedAttention(SMALL)
    many = GroupedAttention(LlamaSize(2, 16, 4, 4, 24))
    with torch.no_grad():
        for name in ("query", "out"):
            getattr(many, name).weight.copy_(getattr(few, name).weight)
        for name in ("key", "value"):
            rows = getattr(few, name).weight.unflatten(0, (2, 4)).repeat_interleave(2, 0)
            getattr(many, name).weight.copy_(rows.flatten(0, 1))
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(few(x), many(x))


def test_there_are_no_biases():
    assert all(m.bias is None for m in Llama(SMALL).modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("wrong", [(0, 16, 4, 2, 24), (2, 12, 4, 2, 24), (2, 16, 4, 3, 24)])
def test_sizes_that_do_not_fit(wrong):
    with pytest.raises(SettingError, match=r"A Llama has .* twice the heads divide the width"):
        LlamaSize(*wrong)


def test_no_tokens():
    with pytest.raises(SettingError, match="A Llama has vocabulary 0 but needs at least 1"):
        Llama(SMALL, 0)
