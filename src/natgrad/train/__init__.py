"""Training runs: what they are told, the loop, and checkpoints that go on bit for bit."""

from natgrad.train.loop import Outcome, train
from natgrad.train.presets import PRESETS, preset
from natgrad.train.settings import Settings

__all__ = ["PRESETS", "Outcome", "Settings", "preset", "train"]
