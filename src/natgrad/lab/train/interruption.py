"""Ctrl-C and SIGTERM end a run after the step that is under way."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """``with Interruption() as interruption``: then ``interruption.signal`` is the number of the
    signal that came, or 0. A second one ends the process as if nothing were here."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # others cannot
            self._before = {number: signal.signal(number, self._came) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
