"""Weights that a run starts from instead of random ones: the last of another run, or a file's.

So a training has phases: each is a run with settings of its own, to which only the weights of the
one before come (Pauloski 2022, sec. 6.3.3). Optimizer and curvature begin anew.
"""

from pathlib import Path

from torch import nn

from natgrad.comm import Alone
from natgrad.errors import SettingError
from natgrad.lab.models import weights
from natgrad.lab.train.state import Checkpoints


def start_file(start: str) -> Path:
    """The file that ``start`` means: itself, or the last checkpoint of the run in that folder."""
    path = Path(start).expanduser()
    if not path.exists():
        raise SettingError(
            f"start_from is {start}, which is not there: name the folder of a run, or a file of "
            "weights."
        )
    if not path.is_dir():
        return path
    last = Checkpoints(path / "checkpoints", 1, Alone()).last()
    if last is None:
        raise SettingError(
            f"start_from is {start}, a folder without a checkpoint: name that of a run which has "
            "saved one, or a file of weights."
        )
    return last


def load_start(model: nn.Module, start: str) -> None:
    """All weights of the model, which must have the same names and shapes."""
    remedy = "name a run with the same network, width, layers, heads, data and, for gpt, context"
    weights.load_into(model, start_file(start), "start_from", remedy)
