"""What natgrad raises, by kind. A message says what was given, what is allowed and what to do."""

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ConvergenceError",
    "CoverageError",
    "DataError",
    "NatgradError",
    "SettingError",
]


class NatgradError(Exception):
    """Base of everything natgrad raises itself."""

    everywhere = False  # whether all ranks are known to raise the same


class SettingError(NatgradError, ValueError):
    """A setting is outside of what is allowed."""


class CoverageError(NatgradError, ValueError):
    """A layer cannot be treated in the way that was asked for, or no layer can."""


class CaptureError(NatgradError, RuntimeError):
    """A training step left no statistics where there must be some."""


class CheckpointError(NatgradError, ValueError):
    """A checkpoint does not fit the model or the settings."""


class DataError(NatgradError, RuntimeError):
    """A data set is missing, incomplete or spoilt, or cannot be brought here."""


class ConvergenceError(NatgradError, ArithmeticError):
    """An iteration met a number it cannot go on with."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough to stand inside of a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
