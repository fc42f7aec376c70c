"""What is measured again of a paper: an item, its findings, and what they come to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from natgrad.tables import Table

Result = dict[str, Any]  # of one seed: numbers by name, as JSON keeps them
Tell = Callable[[str], None]  # is told what is being done


@dataclass(frozen=True)
class Finding:
    """A sentence of a paper that can be checked.

    Arguments:
        text: what the paper says.
        margin: of one seed's result, how far it holds: above 0 it does, and by how much is shown.
        unit: of the margin, in words.
    """

    text: str
    margin: Callable[[Result], float]
    unit: str = ""

    def line(self, results: Sequence[Result]) -> str:
        """Held or not held, on how many seeds, and how far these lie apart.

        Arguments:
            results: one for each seed.
        """
        margins = [self.margin(result) for result in results]
        held = sum(margin > 0 for margin in margins)
        spread = f"{min(margins):.3g} to {max(margins):.3g}"
        if len(margins) == 1:
            spread = f"{margins[0]:.3g}"
        seeds = f"{held} of {len(margins)} seeds" if len(margins) > 1 else "no chance in it"
        verdict = "held" if held == len(margins) else "**not held**"
        return f"{verdict} ({seeds}; {self.unit} {spread}): {self.text}"


class Item(ABC):
    """One table or figure of a paper.

    ``name`` names it on the command line, ``papers`` says where it stands, ``printed`` what stands
    there, and ``cluster`` the command with the paper's own settings. ``remark`` says why figures
    here differ from the paper's, ``chance`` is whether seeds differ, and ``needs`` a package that
    must be installed besides.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[str]
    printed: ClassVar[str]
    cluster: ClassVar[str] = ""
    remark: ClassVar[str] = ""
    chance: ClassVar[bool] = True
    needs: ClassVar[str] = ""

    @abstractmethod
    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        """The numbers of one seed.

        Arguments:
            seed: of all that is random.
            smoke: whether a few seconds must do; the numbers then mean nothing.
            tell: is told what is being done.
        """

    @abstractmethod
    def findings(self) -> tuple[Finding, ...]:
        """What is said in words."""

    @abstractmethod
    def table(self, results: Sequence[Result]) -> Table:
        """To be laid beside the paper's.

        Arguments:
            results: one for each seed.
        """

    @abstractmethod
    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        """The figure, on axes of matplotlib.

        Arguments:
            axes: to draw on.
            results: one for each seed.
        """

    def picture(self, results: Sequence[Result], path: str | PathLike[str]) -> None:
        """Draw the figure to a file.

        Arguments:
            results: one for each seed.
            path: ends in .svg, .png or .pdf.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        self.draw(axes, results)
        axes.set_title(self.title, fontsize=10)
        figure.savefig(path, dpi=150)


def middle(values: Sequence[float], form: str) -> str:
    """'0.5 (0.4–0.6)': the median over seeds with the least and the most.

    Arguments:
        values: one for each seed.
        form: of a number, as `format` takes it.
    """
    ordered = sorted(values)
    median = ordered[len(ordered) // 2]
    if len(ordered) == 1:
        return format(median, form)
    return f"{median:{form}} ({ordered[0]:{form}}–{ordered[-1]:{form}})"
