"""What a training step costs besides K-FAC, in operations and bytes.

Operations and activations are those of one sample, so that one `Workload` is priced at any batch.
"""

from dataclasses import dataclass

from natgrad.checks import FRACTION, NOT_NEGATIVE, Range, check_numbers, check_whole_fields

_SHARE = Range(low=FRACTION.low, high=1)
_SOME = Range(0, 1, open_low=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that a backward pass has finished, from when on it can be sent.

    Arguments:
        numel: numbers in it, at least 1.
        share: of the operations of the backward pass that are done by then, from 0 to 1.
        block: name of the K-FAC block that the parameter belongs to; empty if to none.
    """

    numel: int
    share: float
    block: str = ""

    def __post_init__(self) -> None:
        check_whole_fields(self, "numel")
        check_numbers(self, share=_SHARE)


@dataclass(frozen=True, slots=True)
class Workload:
    """One rank's part of a training step, without K-FAC's own decompositions and products.

    Arguments:
        parameters: numbers in all parameters of the model, at least 1.
        forward: operations of a forward pass of one sample.
        backward: operations of a backward pass of one sample.
        statistics: operations of one sample's products for the factors, at an update.
        activations: bytes that the forward pass of one sample leaves for the backward pass.
        batch: samples of one rank in a step, at least 1.
        parameter_bytes: bytes of one number of a parameter, and of its gradient.
        optimizer_bytes: bytes that the optimizer keeps for each number: 4 is SGD with momentum, 8
            Adam.
        arrivals: when gradients come, in the order of the backward pass; none at all stands for
            gradients that come evenly.
        measured: which samples the curvature is measured on: a share of them, a float in (0, 1]; or
            as an int a number of samples, of all ranks together.
    """

    parameters: int
    forward: float
    backward: float
    statistics: float
    activations: float
    batch: int = 1
    parameter_bytes: int = 4
    optimizer_bytes: int = 4
    arrivals: tuple[Arrival, ...] = ()
    measured: float = 1.0

    def __post_init__(self) -> None:
        check_whole_fields(self, "parameters", "batch", "parameter_bytes")
        amounts = ("forward", "backward", "statistics", "activations", "optimizer_bytes")
        check_numbers(self, **dict.fromkeys(amounts, NOT_NEGATIVE))
        if isinstance(self.measured, int):
            check_whole_fields(self, "measured")
        else:
            check_numbers(self, measured=_SOME)

    def measured_share(self, ranks: int) -> float:
        """Share of a rank's samples that the curvature is measured on at an update, on average.

        Arguments:
            ranks: how many there are, each with a batch of its own.
        """
        if isinstance(self.measured, int):
            return min(1.0, self.measured / (self.batch * ranks))
        return self.measured
