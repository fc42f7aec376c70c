"""The change rates of all factors of a run, ``|X_t - X_{t-1}|_F / |X_{t-1}|_F``, update by update.

An interval between refreshes is long enough where they are small (Osawa 2019, sec. 4.3): they fall
as training goes on and as batches grow, and the factors of inputs change less than those of
gradients.
"""

from statistics import median
from typing import Protocol

from natgrad.capture.averages import NewEstimate
from natgrad.capture.blocks import Block
from natgrad.capture.change_rates import Change, FactorChanges
from natgrad.tables import Column, Table


class Watched(Protocol):
    """What is asked of a preconditioner."""

    blocks: list[Block]
    steps: int


class ChangeRates:
    """``kfac.track_changes()``: of the factors that this rank keeps, in the blocks that are there
    when it is called. Prints as a table; ``stop()`` gives the copies of the factors back.

    ``found`` has the changes by ``(block, factor)``. Numbers in a basis that every refresh changes
    (EKFAC's) are left out.
    """

    def __init__(self, kfac: Watched) -> None:
        self._kfac = kfac
        self._factors: dict[tuple[str, str], FactorChanges] = {}
        for block in kfac.blocks:
            block.watcher = self

    def __call__(self, block: Block, estimate: NewEstimate, decay: float) -> None:
        for name, gap in estimate.gaps.items():
            if name not in block.structure.in_basis:
                key, running = (block.name, name), block.running[name]
                if key not in self._factors:
                    self._factors[key] = FactorChanges(running.form)
                step = self._kfac.steps
                self._factors[key].add(step, running.mean, running.weight, gap, decay)

    @property
    def found(self) -> dict[tuple[str, str], list[Change]]:
        return {key: changes.found for key, changes in self._factors.items()}

    def stop(self) -> None:
        """Measure no longer; what was found stays."""
        for block in self._kfac.blocks:
            if block.watcher is self:
                block.watcher = None
        for changes in self._factors.values():
            changes.forget()

    def table(self) -> Table:
        """Of every factor how often it was compared, and its median and last change."""
        rows = []
        for (block, name), changes in self.found.items():
            if changes:
                cells = [(c.estimate, c.average) for c in changes]
                middle = (median(c[i] for c in cells) for i in (0, 1))
                numbers = (f"{value:.3g}" for value in (*middle, *cells[-1]))
                rows.append((block, name, str(len(changes)), *numbers))
        columns = (
            Column("block"),
            Column("factor"),
            Column("changes", "right"),
            *tuple(
                Column(name, "right")
                for name in (
                    "estimate, median",
                    "average, median",
                    "estimate, last",
                    "average, last",
                )
            ),
        )
        return Table("Change rates", columns, tuple(rows), "of whole matrices, in Frobenius norm")

    def __str__(self) -> str:
        return str(self.table())
