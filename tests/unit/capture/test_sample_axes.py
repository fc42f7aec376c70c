"""Where the samples of a layer are, found by their number, against gradients of single samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from natgrad import KFAC
from natgrad.errors import CoverageError, SettingError
from natgrad.layers.linear import Linear


class Encoded(nn.Module):
    """Samples in front, but for torch's encoder inside, which has its tokens there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 10, dropout=0.0)
        self.encoder = nn.TransformerEncoder(
            layer, 1, norm=nn.LayerNorm(8), enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens).transpose(0, 1)).mean(0))


class Turned(nn.Module):
    """The same by hand, of which torch says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm, self.mix, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).transpose(0, 1))
        return self.head(self.mix(x).tanh().cumsum(0).mean(0))


class Windows(Turned):
    """Samples in front, with windows folded into them, as many tokens in each as there are
    samples."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).reshape(-1, 4, 8)
        x = self.mix(self.norm(x)).tanh().cumsum(1).mean(1)
        return self.head(x.reshape(len(tokens), -1, 8).mean(1))


def batch(n: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return (
        torch.randint(11, (n, tokens), generator=generator),
        torch.randint(3, (n,), generator=generator),
    )


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> Tensor:
    """``[n, parameters]``, a sample at a time."""
    rows = []
    for one, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(one[None]), label[None])
        grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def check(model: nn.Module, kfac: KFAC, x: Tensor, y: Tensor) -> None:
    """The diagonal of every block's F is that of single samples."""
    for block in kfac.blocks:
        if "F" not in block.kept():
            continue
        names = [n for n, p in model.named_parameters() if any(p is q for q in block.parameters)]
        if len(names) != len(block.parameters) or "attn" in block.name:
            continue  # a slice of a packed weight
        form, kept = block.forms["F"], block.kept()["F"]
        trace = kept.sum() if form.diagonal else form.trace(kept).sum()
        expected = sample_gradients(model, x, y, names).square().sum() / len(x)
        torch.testing.assert_close(trace, expected, msg=block.name)


def trained(model: nn.Module, sizes: list[tuple[int, int]], **settings) -> KFAC:
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, factor_decay=0.0, **settings)
    for n, tokens in sizes:
        x, y = batch(n, tokens)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        kfac.capture.disarm()
        check(model, kfac, x, y)
        kfac.capture.forget()
        kfac.capture.arm()
    return kfac


STRUCTURES = [None, natgrad.UnitWise(), natgrad.Diagonal(), natgrad.Full()]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("sizes", [(6, 4), (3, 7), (4, 8), (5, 5)], ids=str)
def test_an_encoder_with_tokens_in_front(structure, sizes):
    """(4, 8) looks like two windows a sample, and (5, 5) like anything: torch's encoder tells."""
    torch.manual_seed(0)
    trained(Encoded().double(), [sizes], structure=structure)


@pytest.mark.parametrize("sizes", [[(6, 4)], [(3, 7)], [(3, 7), (4, 8)], [(6, 4), (5, 5)]], ids=str)
def test_axes_that_were_turned_by_hand(sizes):
    """What a batch has shown beyond doubt holds for one that leaves a doubt."""
    torch.manual_seed(0)
    trained(Turned().double(), sizes, structure=natgrad.Diagonal())


def test_a_doubt_is_told_and_the_user_decides():
    torch.manual_seed(0)
    told = r"LayerNorm 'norm' is called with \[8, 4\] for 4 samples"
    with pytest.warns(UserWarning, match=told), pytest.raises(AssertionError, match="norm"):
        trained(Turned().double(), [(4, 8)])
    said = natgrad.MeanLoss(batch_axis={"norm": 1, "mi*": 1})
    trained(Turned().double(), [(4, 8)], structure=natgrad.Diagonal(), loss=said)


def test_windows_that_are_folded_into_samples():
    torch.manual_seed(0)
    trained(Windows().double(), [(3, 8)], structure=natgrad.Diagonal())
    with pytest.warns(UserWarning, match="may lie along axis 0 or 1; 0 is taken"):
        trained(Windows().double(), [(4, 8)])
    trained(Windows().double(), [(3, 8), (4, 8)])  # as it was in the batch before


def test_ekfac_and_reduce_see_whole_samples():
    """They are those of a model that has its samples in front."""

    class Front(Turned):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.norm(self.embedding(tokens))
            return self.head(self.mix(x).tanh().cumsum(1).mean(1))

    for structure in (natgrad.EKFAC(), natgrad.Kronecker(sharing="reduce")):
        found = []
        for kind in (Turned, Front):
            torch.manual_seed(0)
            model = kind().double()
            kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, structure=structure)
            for n, tokens in ((6, 4), (3, 7)):
                x, y = batch(n, tokens)
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                kfac.step()
            found.append([p.grad for p in model.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_axes_are_checked_when_they_are_given():
    with pytest.raises(SettingError, match=r"batch_axis\['a'\] is -1 but must be a whole number"):
        natgrad.MeanLoss(batch_axis={"a": -1})
    with pytest.raises(SettingError, match="must be an axis, or map patterns of modules to axes"):
        natgrad.SumLoss(batch_axis={1: 1})
    with pytest.raises(CoverageError, match="batch_axis has 'nowhere', which matches no module"):
        KFAC(Turned(), kl_clip=None, loss=natgrad.MeanLoss(batch_axis={"nowhere": 1}))
    assert natgrad.MeanLoss(batch_axis={"": 1, "a": 0}).axis_of_model == 1


@pytest.mark.parametrize(("shape", "expected"), [((7, 3), (7, 3)), ((4, 7, 3), (7, 4, 3))])
def test_samples_of_a_second_axis_come_first_if_there_is_one(shape, expected):
    """What has no position left has its samples in front; features are no samples."""
    layer = Linear("layer", nn.Linear(3, 2))
    layer.batch_axis = 1
    assert layer.samples_first(torch.zeros(shape), 1).shape == expected
    assert layer.count(torch.zeros(shape)) == expected[0]
