"""Which layers and parameters belong together, and patterns that match nothing."""

import pytest
import torch
from torch import nn

from natgrad import KFAC, NaturalMuon
from natgrad.capture.output_hooks import on_gradient
from natgrad.errors import CoverageError
from natgrad.layers import Experts


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 4, 4)) for _ in range(2))


def test_a_pattern_of_split_may_match_one_stack_of_several():
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "experts": Mixture()})
    names = {b.name for b in NaturalMuon(model, split={"experts.up": Experts((1, 3))}).kfac.blocks}
    assert len([name for name in names if name.startswith("experts.up")]) == 4
    with pytest.raises(CoverageError, match=r"split has 'experts.side', which matches no module"):
        NaturalMuon(model, split={"experts.side": Experts((1, 3))})
    # Other settings are of modules, and a stack is none.
    with pytest.raises(CoverageError, match=r"exclude has 'experts.up', which matches no module"):
        NaturalMuon(model, exclude=["experts.up"])


def test_a_weight_that_is_split_is_shared_by_layers_that_are_split_alike():
    tied = nn.ModuleDict(
        {"qkv": nn.Linear(4, 12, bias=False), "other": nn.Linear(4, 12, bias=False)}
    )
    tied["other"].weight = tied["qkv"].weight
    with pytest.raises(CoverageError, match="Linear 'other' shares its weight with a layer whose"):
        KFAC(tied, kl_clip=None)
    (one,) = KFAC(tied, kl_clip=None, split={}).blocks
    assert [layer.name for layer in one.layers] == ["qkv", "other"]
    both = KFAC(tied, kl_clip=None, split={"*": (4, 4, 4)}).blocks
    assert [[layer.name for layer in block.layers] for block in both] == [
        [f"{name}.{part}" for name in ("qkv", "other")] for part in range(3)
    ]


@pytest.mark.parametrize("casts", [0, 1, 2])
def test_the_gradient_of_what_an_output_was_cast_from(casts):
    """A model computes its loss from logits in 32 bits, and returns others."""
    x, told = torch.randn(3, requires_grad=True), []
    logits = 2 * x
    out = logits
    for dtype in (torch.float64, torch.float16)[:casts]:
        out = out.to(dtype)
    on_gradient(out, told.append)
    (3 * logits if casts else 3 * out).sum().backward()
    assert [g.tolist() for g in told] == [[3.0] * 3]
    leaf, heard = torch.randn(2, requires_grad=True), []
    on_gradient(leaf, heard.append)
    leaf.sum().backward()
    assert [g.tolist() for g in heard] == [[1.0, 1.0]]
