"""How many numbers the curvature matrix of AlexNet and ResNet-50 has in each structure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from natgrad import KFAC
from natgrad.lab.names import NETWORKS
from natgrad.lab.report.sizes import network_sizes
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell
from natgrad.structures import UnitWise
from natgrad.tables import Column, Table, bytes_text

NETS = ("alexnet", "resnet50")
SHOWN = ("full", "layer block", "Kronecker", "diagonal")


class SizeTable(Item):
    """From shapes alone."""

    name = "sizes"
    title = "Sizes of the Fisher matrix: full, layer by layer, Kronecker"
    papers = "Schmidt's slides; Osawa 2019, sec. 5.4"
    printed = (
        "the step from one full matrix over blocks to Kronecker factors, for AlexNet; of "
        "ResNet-50's factors 1,017 MiB with full blocks of norm layers, 587 MiB with diagonal ones."
    )
    cluster = "natgrad plan --network alexnet --sizes"
    chance = False

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        nets = NETS[:1] if smoke else NETS
        entries = {name: network_sizes(NETWORKS[name].without_weights()).entries() for name in nets}
        return {"entries": entries, "norms": None if smoke else _norms()}

    def findings(self) -> tuple[Finding, ...]:
        def smaller(result: Result) -> float:
            sizes = [_shown(of)[:3] for of in result["entries"].values()]
            return min(big / small for of in sizes for big, small in pairwise(of)) - 1

        def printed(result: Result) -> float:
            if result["norms"] is None:
                return 0.0
            off = [abs(float(a) - b) for a, b in zip(result["norms"], (1017, 587), strict=True)]
            return 0.5 - max(off)

        return (
            Finding(
                "blocks are smaller than the full matrix, and Kronecker factors than blocks",
                smaller,
                "by a factor, less 1, of at least",
            ),
            Finding(
                "ResNet-50 needs 1,017 MiB, and 587 MiB with diagonal norm layers",
                printed,
                "to the MiB, with room of",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = [
            (net, *(f"{count:,} ({bytes_text(4 * count)})" for count in _shown(of)))
            for net, of in results[0]["entries"].items()
        ]
        columns = (Column("network"), *(Column(name, "right") for name in SHOWN))
        return Table(self.title, columns, tuple(rows), "numbers, and their bytes in float32")

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for net, of in results[0]["entries"].items():
            axes.plot(SHOWN, _shown(of), "o-", label=net)
        axes.set_yscale("log")
        axes.set_ylabel("numbers")
        axes.legend(frameon=False)


def _shown(of: dict[str, int]) -> list[int]:
    return [of[name] for name in SHOWN]


def _norms() -> tuple[float, float]:
    """MiB of all factors of ResNet-50 in float32, norm layers as one matrix ``2C × 2C`` each and as
    a diagonal."""
    kfac = KFAC(NETWORKS["resnet50"].without_weights(), kl_clip=None, max_dim=None)
    whole = other = 0
    for block in kfac.blocks:
        if isinstance(block.structure, UnitWise):
            numbers = sum(p.numel() for p in block.parameters)
            whole, other = whole + numbers**2, other + numbers
        else:
            squares = sum(form.batch * form.dim**2 for form in block.forms.values())
            whole, other = whole + squares, other + squares
    return round(whole * 4 / 2**20), round(other * 4 / 2**20)
