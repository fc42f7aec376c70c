"""The benchmark of curvature compares right results: its yardstick, its errors and its table."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import contenders, curvature, plain
from peers import dense

TINY = {
    "mlp": curvature.Network(
        "MLP", curvature.mlp(6, 5, 4, 3), (6,), 7, tuple(curvature.TASKS), classes=3, columns=5
    ),
    "cnn": curvature.Network(
        "CNN",
        curvature.conv_net(5, (2, 3), 3),
        (1, 5, 5),
        6,
        tuple(curvature.TASKS),
        classes=3,
        columns=5,
    ),
}
PEERS = [
    kind for kind in contenders.CONTENDERS if kind not in (contenders.Natgrad, contenders.Plain)
]


@pytest.fixture
def _alone(monkeypatch):
    """As where no other library is installed."""
    for kind in PEERS:
        monkeypatch.setattr(kind, "package", "a-library-that-nobody-wrote")


def test_networks_have_the_sizes_they_are_known_by():
    sizes = {
        name: sum(p.numel() for p in network.operands().model().parameters())
        for name, network in curvature.NETWORKS.items()
    }
    assert sizes == {"small": 7_002, "mlp": 109_386, "cnn": 9_098}


@pytest.mark.parametrize("name", TINY)
def test_what_errors_are_measured_against_is_exact(name):
    """In float64, `plain.py` is dense autograd."""
    operands = TINY[name].operands()
    exact = curvature.Truth(operands)
    model, loss, x, y, v = exact.model, nn.CrossEntropyLoss(), exact.x, exact.y, exact.v
    G, H = dense.ggn(model, loss, x, y), dense.hessian(model, loss, x, y)
    kfac = dense.layer_blocks(model, loss, x, y, dense.kfac_expand)
    apart = kfac * torch.block_diag(
        *(torch.ones_like(p.view(-1, 1) @ p.view(1, -1)) for p in model.parameters())
    )
    eigenvalues = torch.linalg.eigvalsh(H).flip(0)[: contenders.TOP]
    spectrum = torch.linalg.eigvalsh(G).flip(0)
    found = {
        "fisher": (exact.fisher, G),
        "diagonal": (exact.diagonal, G.diagonal()),
        "kfac": (plain.kfac_product(model, exact.kfac, v), kfac @ v),
        "apart": (plain.kfac_product(model, exact.kfac, v, apart=True), apart @ v),
        "products": (exact.products, G @ v),
        "product": (plain.product(model, x, v), G @ v),
        "eigenvalues": (exact.top_eigenvalues, eigenvalues),
    }
    for what, (ours, truth) in found.items():
        assert curvature.error(ours, truth) < 1e-12, what
    assert curvature.spectral_error(exact.gram_eigenvalues, spectrum) < 1e-12
    assert exact.trace == pytest.approx(float(G.trace()), rel=1e-12)
    assert plain.trace(model, x) == pytest.approx(float(G.trace()), rel=1e-12)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", TINY)
def test_natgrad_and_plain_torch_are_right(name, capsys):
    table = curvature.table(TINY[name], repeats=1)
    assert [row.name for row in table.rows] == [
        task.title.format(columns=5) for task in curvature.TASKS.values()
    ]
    for row in table.rows:
        assert set(row.seconds) == {"natgrad", "plain"}, row.name
        assert max(row.errors.values()) < 1e-5, row.name
        assert row.figure > 0
    full_fisher = table.rows[0]
    assert set(full_fisher.absent.values()) == {"not installed"}
    text = table.render()
    assert "parameters, batch" in text.splitlines()[0]
    assert "not installed" in text
    assert capsys.readouterr().err.count(":") == len(curvature.TASKS)


@pytest.mark.usefixtures("_alone")
def test_the_command(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    monkeypatch.setattr(curvature, "NETWORKS", TINY)
    options = ["--networks", "mlp", "--tasks", "trace", "--repeats", "1", "--markdown", "--json"]
    monkeypatch.setattr(sys, "argv", ["curvature.py", *options, str(file)])
    curvature.main()
    text = capsys.readouterr().out
    assert "curvlinops not installed, BackPACK not installed, NNGeometry not installed" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| trace of G")]
    assert line.count("not installed") == 3
    (row,) = json.loads(file.read_text())["tables"][0]["rows"]
    assert row["errors"]["natgrad"] < 1e-5


def test_wrong_results_are_not_what_natgrad_is_compared_with():
    seconds = {"natgrad": 2.0, "plain": 3.0, "curvlinops": 1.0}
    right = dict.fromkeys(seconds, 1e-7)
    assert curvature.figure(seconds, right) == 0.5
    assert curvature.figure(seconds, right | {"curvlinops": 0.1}) == 1.5
    assert math.isnan(curvature.figure(seconds, right | {"curvlinops": 0.1, "plain": 1.0}))


def test_cells_say_why_there_is_no_figure():
    row = curvature.Result(
        "trace of G",
        2.0,
        seconds={"natgrad": 1e-3, "plain": 2e-3},
        errors={"natgrad": 0.0, "plain": 1e-6},
        absent={"curvlinops": "not installed", "BackPACK": "-", "NNGeometry": "-"},
    )
    expected = ("trace of G", "2x", "1 (0e+00)", "2 (1e-06)", "not installed", "-", "-")
    assert row.cells() == expected
    assert replace(row, figure=math.nan).cells()[1] == ""


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("peer", PEERS, ids=lambda kind: kind.name)
def test_other_libraries_are_asked_for_the_same(peer, name):
    """What each gives is right, but for Kronecker factors of convolutions by BackPACK."""
    if peer.installed() is None:
        pytest.skip(f"{peer.package} is not installed")
    operands = TINY[name].operands()
    exact, contender, offered = curvature.Truth(operands), peer(operands), 0
    for task in curvature.TASKS.values():
        if hasattr(peer, task.method):
            offered += 1
            error = task.error(contender, getattr(contender, task.method)(), exact)
            wrong = peer is contenders.Backpack and (task.method, name) == ("kfac", "cnn")
            assert (error > 0.1) if wrong else (error < 1e-4), task.title
    assert offered >= 6
