"""`natgrad plan --calibrate FILE` in a hurry, for processes that torchrun starts."""

import sys

from natgrad.cli import calibration, run
from natgrad.lab.calibration import CalibrationSettings

QUICK = CalibrationSettings(
    (2, 40), (1 << 10, 1 << 16), rounds=1, round_seconds=1e-4, layers=2, width=16
)

if __name__ == "__main__":
    calibration.SETTINGS = QUICK
    run(["plan", "--calibrate", sys.argv[1]])
