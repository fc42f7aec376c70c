"""What a run has to tell: a line of JSON for each moment, and the same for TensorBoard."""

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from natgrad.errors import CheckpointError
from natgrad.lab.train.state import write_text

NAME = "log.jsonl"


class Log:
    """``log.jsonl`` in ``folder``, from which lines after ``step`` are taken when a run goes on:
    they come anew. TensorBoard's files are beside it if that is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / NAME
        kept = [line for line in _lines(self.path) if line["step"] <= step]
        write_text(self.path, "".join(f"{json.dumps(line)}\n" for line in kept))
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        self._board = _board(folder, step)

    def __call__(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """``kind``: "train" (of the last batch), "test", "fit" (the same metrics on training data),
        "drift" or "stages" (of K-FAC)."""
        line = json.dumps({"kind": kind, "step": step, **values})
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """What could not be written before is tried again, and may fail again."""
        try:
            with closing(self._file):
                if self._board is not None:
                    self._board.close()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"The log {self.path} could not be written ({error.strerror}), checkpoints are intact: "
            "make room, or name another folder with --out."
        )


class NoLog:
    """Of all ranks but the first."""

    def __call__(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, in their order; raises ``UnicodeDecodeError`` for a file that is no
    log at all."""
    path = folder / NAME
    if not (found := _lines(path)) and path.exists():
        path.read_text(encoding="utf-8")
    return found


def kfac_share(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the seconds of all steps that are told with K-FAC's share, that share; a line of "train"
    tells of the steps since the one before."""
    spent = total = 0.0
    before = 0
    for line in lines:
        if line["kind"] == "train":
            seconds, share = line.get("seconds"), line.get("share")
            if isinstance(seconds, int | float) and isinstance(share, int | float):
                all_of_them = seconds * (line["step"] - before)
                spent, total = spent + share * all_of_them, total + all_of_them
            before = line["step"]
    return spent / total if total else None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a process that was killed left half of one
            continue
        if isinstance(line, dict) and type(line.get("step")) is int and "kind" in line:
            found.append(line)
    return found


def _board(folder: Path, step: int) -> Any:
    try:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return None
    return writer(folder / "tensorboard", purge_step=step + 1)
