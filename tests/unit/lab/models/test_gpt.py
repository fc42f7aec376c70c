"""The GPT has GPT-2's size, looks only back, and computes what its formula says."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.errors import SettingError
from natgrad.lab.models import GPT


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_it_has_the_size_of_gpt_2():
    with torch.device("meta"):
        assert size(GPT(50257, 1024, layers=12, heads=12, width=768)) == 124_439_808


def test_an_untied_head_has_weights_of_its_own():
    tied, untied = (GPT(11, 8, layers=1, heads=2, width=4, tied=tied) for tied in (True, False))
    assert size(untied) - size(tied) == 11 * 4
    assert tied.head.weight is tied.token.weight


def test_a_position_does_not_see_the_next_ones():
    model = GPT(11, 8, layers=2, heads=2, width=8)
    tokens = torch.randint(11, (2, 8))
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 11
    before, after = model(tokens), model(other)
    assert before.shape == (2, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_layer_computes_its_formula():
    model = GPT(5, 4, layers=1, heads=2, width=6).double()
    layer = model.layers[0]
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    q, k, v = layer.attention.inner(layer.norm1(x)).split(6, -1)
    heads = []
    for i in range(2):
        mine = slice(3 * i, 3 * i + 3)
        scores = q[..., mine] @ k[..., mine].transpose(1, 2) / 3**0.5
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., mine])
    y = x + layer.attention.out(torch.cat(heads, -1))
    y = y + layer.out(F.gelu(layer.inner(layer.norm2(y)), approximate="tanh"))
    torch.testing.assert_close(layer(x), y)


def test_branches_start_smaller_the_more_there_are():
    torch.manual_seed(0)
    model = GPT(5, 4, layers=8, heads=2, width=64)
    assert abs(model.layers[3].out.weight.std() / (0.02 / 4) - 1) < 0.05
    assert abs(model.layers[3].inner.weight.std() / 0.02 - 1) < 0.05


def test_dropout_is_for_training_alone():
    model = GPT(5, 4, layers=1, heads=1, width=8, dropout=0.5)
    tokens = torch.randint(5, (2, 4))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_errors():
    with pytest.raises(SettingError) as error:
        GPT(5, 4, heads=3, width=8)
    assert str(error.value) == (
        "A GPT has vocabulary 5, context 4, 4 layers, 3 heads and width 8 but each must be at "
        "least 1, and heads divide the width: pass such numbers."
    )
    with pytest.raises(SettingError) as error:
        GPT(5, 4, layers=1, heads=1, width=8)(torch.zeros(1, 6, dtype=torch.int64))
    assert str(error.value) == "A GPT of context 4 was given 6 tokens: give it at most 4."
