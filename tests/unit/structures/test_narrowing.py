"""What is kept of wide factors: the blocks of the whole one, by every layer, and by default."""

import pytest
import torch
from torch import nn

from cases import CASES, losses
from natgrad import EKFAC, KFAC, Cholesky, Eigen, Kronecker, NaturalMuon, Spectral, fisher, hessian
from natgrad.errors import SettingError
from natgrad.geometry import Elementwise
from natgrad.linalg.block_diagonal import even_sections, spans
from natgrad.linalg.forms import BlockTriangle, DiagonalForm
from natgrad.structures import MAX_DIM
from oracles import close

BY_NAME = {case.name: case for case in CASES}
NAMES = ["linear", "linear-2", "conv2d-groups", "conv2d-correlations", "embedding-2", "tied"]


def averages(case, structure):
    model = case.model()
    kfac = KFAC(model, kl_clip=None, update_every=1, refresh_every=1, structure=structure)
    losses(case, model(*case.data(3, 0))).mean().backward()
    kfac.step()
    (block,) = kfac.blocks
    return {name: block.forms[name].dense(kept) for name, kept in block.kept().items()}


def masked(dense, block):
    d = dense.shape[-1]
    where = torch.cat(
        [
            torch.full((size,), 1000 * first + index)
            for first, _, count, size in spans(even_sections(d, block))
            for index in range(count)
        ]
    )
    return dense * (where.unsqueeze(0) == where.unsqueeze(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_those_of_the_whole_factor(name, block, sharing):
    case = BY_NAME[name]
    whole = averages(case, Kronecker(sharing))
    found = averages(case, Kronecker(sharing, input_block=block, gradient_block=block))
    assert found.keys() == whole.keys()
    for factor, dense in found.items():
        assert close(dense, masked(whole[factor], block), 1e-12)


def test_sections_are_even_and_cover_all_columns():
    assert even_sections(9217, 256) == ((4, 250), (33, 249))
    assert even_sections(512, 256) == ((2, 256),)
    assert even_sections(5, 1) == ((5, 1),)
    for dim in (1, 7, 100, 257):
        for size in (1, 2, 64, 1000):
            ends = [(first, end) for first, end, _, _ in spans(even_sections(dim, size))]
            assert ends[0][0] == 0
            assert ends[-1][1] == dim
            assert max(each for _, each in even_sections(dim, size)) <= size


@pytest.mark.parametrize("batch", [1, 3])
def test_a_block_form_packs_all_its_numbers_once(batch):
    form = BlockTriangle(11, 4, batch)
    kept = torch.zeros(form.numel, dtype=torch.float64)
    rows = torch.randn(batch, 20, 10, dtype=torch.float64)  # and a constant 1 behind
    form.add_rows(kept, rows)
    with_ones = torch.cat([rows, torch.ones(batch, 20, 1, dtype=torch.float64)], 2)
    expected = masked(with_ones.mT @ with_ones, 4)
    assert close(form.dense(kept), expected, 1e-12)
    assert close(form.trace(kept), expected.diagonal(dim1=1, dim2=2).sum(1), 1e-12)
    packed = form.pack(kept)
    assert len(packed) == form.sent == batch * (10 + 10 + 6)  # blocks of 4, 4 and 3 columns
    assert close(form.dense(form.unpack(packed)), expected, 1e-12)


def test_a_diagonal_takes_rows_and_a_constant():
    form = DiagonalForm(4, 2)
    kept = torch.zeros(8, dtype=torch.float64)
    rows = torch.randn(2, 5, 3, dtype=torch.float64)
    form.add_rows(kept, rows)
    assert close(form.values(kept)[:, :3], rows.square().sum(1), 1e-12)
    assert (form.values(kept)[:, 3] == 5).all()


class Wide(nn.Module):
    """Every kind of layer that can be wide: inputs, classes, channels, a vocabulary."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 3, padding=1)
        self.flat = nn.Linear(48, 6)
        self.embedding = nn.Embedding(40, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.classes = nn.Linear(6, 30)

    def forward(self, x, tokens):
        h = self.flat(self.conv(x).tanh().flatten(1)) + self.embedding(tokens).mean(1)
        h = self.norm(h.tanh())
        return torch.cat([self.head(h), self.classes(h)], 1)


def wide(**settings):
    torch.manual_seed(0)
    model = Wide().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings = {"update_every": 1, "refresh_every": 1, "max_dim": 10, **settings}
    return model, optimizer, KFAC(model, optimizer, **settings)


def train(model, optimizer, kfac, steps=3, first=0):
    for seed in range(first, first + steps):
        torch.manual_seed(seed)
        x, tokens = torch.randn(8, 4, 4, 4).double(), torch.randint(40, (8, 3))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, tokens), torch.randint(70, (8,))).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_wide_sides_are_narrowed_and_coverage_says_so():
    _, _, kfac = wide()
    found = {name: kfac.coverage().covered[name] for name in ("conv.weight", "flat.weight")}
    assert found == {
        "conv.weight": "Kronecker(sharing='expand', input_block=10)",
        "flat.weight": "Kronecker(sharing='expand', input_block=10)",
    }
    assert (
        kfac.coverage().covered["classes.bias"] == "Kronecker(sharing='expand', gradient_block=1)"
    )
    # Its A is a diagonal already, and its G narrow.
    assert kfac.coverage().covered["embedding.weight"] == "Kronecker(sharing='expand')"
    text = str(kfac.coverage())
    assert "3 blocks keep only diagonal blocks" in " ".join(text.split())
    assert "max_dim=None" in text
    _, _, whole = wide(max_dim=None)
    assert "max_dim" not in str(whole.coverage())
    assert {b.forms["A"].sections for b in whole.blocks if "A" in b.forms} == {()}


def test_what_the_user_says_of_a_side_stays():
    _, _, kfac = wide(structure=Kronecker(input_block=20, gradient_block=5))
    own = {block.name: block.structure for block in kfac.blocks}
    assert own["flat"] == Kronecker(input_block=20, gradient_block=5)
    assert own["classes"] == Kronecker(input_block=20, gradient_block=5)


def test_networks_below_the_limit_are_what_they_were():
    """Bit for bit, and their states have the words that they always had."""
    found = [train(*wide(max_dim=limit)) for limit in (None, MAX_DIM)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert repr(Kronecker()) == "Kronecker(sharing='expand')"
    assert repr(EKFAC()) == "EKFAC()"


@pytest.mark.parametrize(
    "settings",
    [
        {"inverse": Eigen()},
        {"inverse": Cholesky()},
        {"structure": EKFAC()},
        {"structure": Kronecker("reduce")},
        {"geometry": Spectral()},
        {"geometry": Spectral(), "inverse": Cholesky()},
        {"geometry": Elementwise()},
        {"momentum": 0.9},
    ],
    ids=repr,
)
def test_a_resumed_run_goes_on_as_it_would_have(settings):
    straight = train(*wide(**settings), steps=5)
    model, optimizer, kfac = wide(**settings)
    train(model, optimizer, kfac, steps=3)
    state, weights = kfac.state_dict(), model.state_dict()
    again, optimizer, kfac = wide(**settings)
    again.load_state_dict(weights)
    kfac.load_state_dict(state)
    resumed = train(again, optimizer, kfac, steps=2, first=3)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_natural_muon_narrows_too():
    torch.manual_seed(0)
    model = Wide().double()
    optimizer = NaturalMuon(model, max_dim=10, update_every=1, refresh_every=1)
    before = [p.clone() for p in model.parameters()]
    after = train(model, optimizer, None)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {b.structure for b in optimizer.kfac.blocks} == {
        Kronecker(),
        Kronecker(input_block=10),
        Kronecker(gradient_block=1),
    }


@pytest.mark.parametrize(
    "structure",
    [Kronecker(input_block=5, gradient_block=4), EKFAC(input_block=5, gradient_block=4)],
    ids=repr,
)
def test_operators_of_blocks(structure):
    """Products, diagonals, traces, norms, spectra and solves of the one dense matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    data = (torch.randn(20, 12).double(), torch.randint(3, (20,)))
    matrix = fisher(model, nn.CrossEntropyLoss(), data, structure=structure)
    dense = matrix.dense()
    v = torch.randn(matrix.size).double()
    assert close(matrix @ v, dense @ v)
    assert close(matrix.diagonal(), dense.diagonal())
    assert float(matrix.norm()) == pytest.approx(float(dense.norm()))
    values = torch.linalg.eigvalsh(dense)
    assert close(matrix.eigenvalues(5).values, values.flip(0)[:5])
    damped = dense + 0.1 * torch.eye(len(dense), dtype=dense.dtype)
    assert close(matrix.solve(v, damping=0.1), torch.linalg.solve(damped, v))
    if isinstance(structure, Kronecker):
        whole = fisher(model, nn.CrossEntropyLoss(), data, structure=Kronecker()).dense()
        a, g = (masked(torch.ones(d, d), b) for d, b in ((13, 5), (9, 4)))
        assert close(dense[:117, :117], _in_parameter_order(whole, torch.kron(g, a)))


def test_the_hessian_keeps_what_it_is_asked_for():
    torch.manual_seed(0)
    model = nn.Linear(5, 4, bias=False).double()
    data = (torch.randn(10, 5).double(), torch.randint(4, (10,)))
    whole, *others = (
        hessian(model, nn.CrossEntropyLoss(), data, structure=structure).dense()
        for structure in (Kronecker(), Kronecker("expand", 3, 2), Kronecker("expand", 1, 1))
    )
    for found, (a, g) in zip(others, ((3, 2), (1, 1)), strict=True):
        ones = [masked(torch.ones(d, d), block) for d, block in ((4, g), (5, a))]
        assert close(found, whole * torch.kron(*ones))


def _in_parameter_order(whole, mask):
    """Weights ``[9, 12]`` and then the bias, of a mask over ``[9, 13]``."""
    order = torch.arange(9 * 13).view(9, 13)
    order = torch.cat([order[:, :12].flatten(), order[:, 12]])
    return whole[:117, :117] * mask[order][:, order]


def test_wrong_sizes_are_refused_in_one_sentence():
    with pytest.raises(
        SettingError, match=r"Kronecker.input_block is 0 but must be a whole number"
    ):
        Kronecker(input_block=0)
    with pytest.raises(SettingError, match=r"EKFAC.gradient_block is 2.5 but must be a whole"):
        EKFAC(gradient_block=2.5)
    with pytest.raises(
        SettingError, match=r"max_dim is 0 but must be a whole number of at least 1"
    ):
        KFAC(nn.Linear(2, 2), kl_clip=None, max_dim=0)
