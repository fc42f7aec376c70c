"""What a folder holds: a run that `natgrad train` has written, or a comparison."""

from __future__ import annotations

from pathlib import Path

from natgrad.errors import DataError, SettingError
from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import NAME as RESULTS
from natgrad.lab.compare.setup import NAME as ASKED
from natgrad.lab.report.page import run_folder
from natgrad.lab.report.page.run_folder import Run
from natgrad.lab.train.logs import NAME as LOG
from natgrad.lab.train.loop import SETTINGS


def read(folder: Path) -> Run | Comparison:
    if not folder.is_dir():
        raise SettingError(
            f"There is no folder {folder}: name that of a run or of a comparison, which natgrad "
            "train and natgrad compare write with --out."
        )
    if (folder / RESULTS).exists():
        return Comparison.read(folder)
    if (folder / ASKED).exists():
        raise DataError(
            f"The comparison in {folder} has no result yet: wait for the first of its runs."
        )
    if (folder / SETTINGS).exists() or (folder / LOG).exists():
        return run_folder.read(folder)
    raise SettingError(
        f"The folder {folder} holds neither a run ({SETTINGS}, {LOG}) nor a comparison "
        f"({RESULTS}): name one that natgrad train or natgrad compare has written with --out."
    )
