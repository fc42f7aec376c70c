"""Training runs: their settings, the loop, and checkpoints that resume bit for bit.

A run is a folder: settings, a log of lines, a record of K-FAC and checkpoints. What a step sees
depends on seed and step alone, so that nothing else has to be saved. Pages (`natgrad.lab.report`)
and comparisons (`natgrad.lab.compare`) read folders and hold no run, so that both work on what a
killed process has left.
"""

from natgrad.lab.train.loop import Outcome, train
from natgrad.lab.train.presets import PRESETS, preset
from natgrad.lab.train.settings import Settings

__all__ = ["PRESETS", "Outcome", "Settings", "preset", "train"]
