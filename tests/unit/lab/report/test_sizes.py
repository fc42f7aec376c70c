"""Sizes of structures, counted by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from natgrad.lab.report.sizes import layers_table, sizes
from natgrad.operators import Problem


class Own(nn.Module):
    """A parameter that is in no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x * self.scale)


def of(model, *shape):
    model.eval()
    data = torch.randn(2, *shape), torch.zeros(2, dtype=torch.long)
    return sizes(Problem(model, F.cross_entropy, data))


def test_a_network_with_all_kinds_of_layers():
    conv = nn.Conv2d(4, 6, 3, groups=2)  # two of 3 x (2 * 9 + 1)
    model = nn.Sequential(conv, nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 5))
    found = of(model, 4, 4, 4)
    assert [(one.name, one.shape, one.parameters) for one in found.layers] == [
        ("0", (2, 3, 19), 114),
        ("1", (1, 6, 2), 12),
        ("3", (1, 5, 25), 125),
    ]
    assert found.entries() == {
        "full": (114 + 12 + 125) ** 2,
        "layer block": 114**2 + 12**2 + 125**2,
        "unit-wise": 6 * 19**2 + 6 * 4 + 5 * 25**2,
        "EKFAC": 2 * (9 + 19**2) + 114 + 6 * 4 + (25 + 25**2) + 125,
        "Kronecker": 2 * (9 + 19**2) + 6 * 4 + (25 + 25**2),
        "diagonal": 251,
    }


def test_the_table_goes_from_full_to_diagonal():
    table = of(nn.Linear(99, 10), 99).table()
    assert table.title == "Sizes of a matrix over 1,000 parameters in float32"
    assert table.column("structure") == (
        "full",
        "layer block",
        "unit-wise",
        "EKFAC",
        "Kronecker",
        "diagonal",
    )
    assert table.column("numbers")[0] == "1,000,000"
    assert table.column("bytes")[0] == "3.81 MiB"
    assert table.column("numbers")[4] == f"{10**2 + 100**2:,}"
    assert table.column("share")[-1] == "0.001"
    assert "–" not in table.footer


def test_a_parameter_in_no_layer():
    found = of(Own(), 3)
    assert {one.name: one.parameters for one in found.layers} == {"head": 8, "scale": 3}
    assert found.parameters == 11
    assert found.entries()["Kronecker"] is None
    assert found.entries()["layer block"] == 64 + 9
    table = found.table()
    assert table.column("numbers")[table.column("structure").index("Kronecker")] == "–"
    assert "a parameter is in no layer that is known" in table.footer


def test_layers_with_further_columns():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    found = of(nn.Sequential(conv, nn.Flatten(), nn.Linear(24, 5)), 4, 4, 4)
    table = layers_table(found.layers, [("trace", ["1.5", "2.5"])])
    assert table.rows == (
        ("0", "Conv2d", "2 · 3 × 19", "114", "1.5"),
        ("2", "Linear", "5 × 25", "125", "2.5"),
    )
