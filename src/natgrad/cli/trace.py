"""What some ranks did, as a trace for chrome://tracing or ui.perfetto.dev.

A rank is a process there. What its main thread did is nested on one track; every message is an
asynchronous event, from its launch to its arrival, on tracks of their own.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import torch

from natgrad.capture.stopwatch import Stopwatch
from natgrad.comm.recording import MessageTimes

Event = dict[str, Any]
TRAINING, OPS = 1, 2  # tracks
_ANCHOR = "natgrad: a moment that both clocks know, number "


@dataclass(frozen=True)
class Span:
    """``start`` and ``end`` in nanoseconds of `time.perf_counter_ns`."""

    name: str
    start: int
    end: int
    step: int

    def overlap(self, start: int, end: int) -> int:
        return max(0, min(self.end, end) - max(self.start, start))


class SpanStopwatch(Stopwatch):
    """Keeps every span and not only their sum; ``step`` is that of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.step = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = perf_counter_ns()
        try:
            with super().__call__(stage):
                yield
        finally:
            self.spans.append(Span(stage, start, perf_counter_ns(), self.step))


@dataclass
class Record:
    """All that one rank has to tell."""

    rank: int
    plan: str
    spans: list[Span]
    messages: list[MessageTimes]
    ops: list[Event] = field(default_factory=list)

    def of(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def hidden(self, message: MessageTimes) -> int:
        """Nanoseconds of a message during which a backward pass ran."""
        end = message.launched if message.arrived is None else message.arrived
        return sum(span.overlap(message.launched, end) for span in self.of("backward"))

    @property
    def start(self) -> int:
        return min(span.start for span in self.spans)


def write(path: Path, records: Sequence[Record], about: dict[str, str]) -> None:
    """As JSON, with times in microseconds since the first event."""
    origin = min(record.start for record in records)
    events = [event for record in records for event in _events(record, origin)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    path.write_text(json.dumps(trace), encoding="utf-8")


def _events(record: Record, origin: int) -> Iterator[Event]:
    rank = record.rank
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield _named("thread_name", rank, TRAINING, "training")

    def microseconds(time: int) -> float:
        return (time - origin) / 1e3

    def slice_of(name: str, start: int, end: int, **args: object) -> Event:
        begin, length = microseconds(start), (end - start) / 1e3
        where = {"ph": "X", "pid": rank, "tid": TRAINING, "cat": "training"}
        return {"name": name, "ts": begin, "dur": length, "args": args, **where}

    for span in record.spans:
        yield slice_of(span.name, span.start, span.end, step=span.step)
    for number, message in enumerate(record.messages):
        sizes = {"bytes": message.sent, "received": message.received}
        about = {"purpose": message.purpose, "kind": message.kind, **sizes}
        yield slice_of(f"launch {message.purpose}", message.launched, message.left, **about)
        for begin, end in message.waits:
            yield slice_of(f"wait for {message.purpose}", begin, end, **about)
        if message.arrived is None:  # nobody asked for it before the recording ended
            continue
        where = {"pid": rank, "tid": TRAINING, "cat": "in message", "id": f"{rank}.{number}"}
        for phase, time in (("b", message.launched), ("e", message.arrived)):
            moment = {"name": message.purpose, "ph": phase, "ts": microseconds(time)}
            yield moment | where | {"args": about}
    if record.ops:
        yield _named("thread_name", rank, OPS, "operations of torch")
    for op in record.ops:
        where = {"ph": "X", "pid": rank, "tid": OPS, "cat": "op"}
        yield {"name": op["name"], "ts": op["ts"] - origin / 1e3, "dur": op["dur"], **where}


def _named(what: str, rank: int, track: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


class Profile:
    """Operations of torch on the main thread, by `torch.profiler`, while it is open."""

    def __init__(self, wanted: bool) -> None:
        self.ops: list[Event] = []
        self._profile = None
        if wanted:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities)
        self._anchors: list[tuple[int, int]] = []  # before and after each such moment

    def __enter__(self) -> "Profile":
        if self._profile is not None:
            self._profile.__enter__()
            for number in range(20):
                before = perf_counter_ns()
                with torch.profiler.record_function(f"{_ANCHOR}{number}"):
                    pass
                self._anchors.append((before, perf_counter_ns()))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
            self.ops = self._shifted(self._profile)

    def _shifted(self, profile: Any) -> list[Event]:
        """Its events, with times in microseconds of `time.perf_counter_ns`: the profiler counts
        from a moment of its own."""
        with TemporaryDirectory(prefix="natgrad-trace-") as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        # The process may have been interrupted during some of them: the shortest knows best.
        _, number = min((after - before, i) for i, (before, after) in enumerate(self._anchors))
        anchor = next(event for event in events if event.get("name") == f"{_ANCHOR}{number}")
        middle = sum(self._anchors[number]) / 2e3
        shift = middle - (anchor["ts"] + anchor["dur"] / 2)
        return [
            {"name": event["name"], "ts": event["ts"] + shift, "dur": event["dur"]}
            for event in events
            if event.get("cat") == "cpu_op" and event.get("tid") == anchor["tid"]
        ]
