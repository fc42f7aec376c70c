"""How much is added to the eigenvalues of the curvature: so much, or so much of what is there.

An absolute damping knows the scale of the loss; the papers' 0.01 is far too much for one network
and nothing for another. `Relative` knows the curvature instead: it stays what it is when the loss
is multiplied by a number, when its terms are summed instead of averaged, and while gradients fall
by orders of magnitude in training.
"""

from dataclasses import dataclass

from natgrad.checks import POSITIVE, check_numbers


@dataclass(frozen=True)
class Relative:
    """A share of the mean eigenvalue: of the block where all of it is damped at once, of each
    factor where factors are damped one by one.

    Arguments:
        share: what is added to every eigenvalue, relative to their mean.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        check_numbers(self, share=POSITIVE)

    def __mul__(self, factor: float) -> "Damping":
        return Relative(self.share * factor) if factor else 0.0


Damping = float | Relative
