"""Even slices of a flat buffer: what every member of a group adds up, or passes on, of a bucket.

    payloads    | a ......... | b ... | c ................ | padding |
    slices      |     0     |     1     |     2     |      3         |

A bucket is the payloads of some ops one behind the other. Its slices are of one length whatever the
payloads are, so that a reduce-scatter or an all-gather of it costs every member the same, however
unevenly factors or gradients belong to ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Overlap(NamedTuple):
    """What a slice has of a payload.

    Arguments:
        member: index of the slice, and of the member of the group that has it.
        start: first number, counted in the payload.
        stop: behind the last one.
        at: where it begins, counted in the slice.
    """

    member: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slices:
    """A bucket cut evenly.

    Arguments:
        lengths: numbers of each payload.
        members: how many slices there are.
    """

    lengths: Sequence[int]
    members: int

    @cached_property
    def starts(self) -> list[int]:
        """Where each payload begins; at the end, how many numbers there are in all."""
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def each(self) -> int:
        """Numbers of a slice, the last of which ends in padding."""
        return -(-self.starts[-1] // self.members)

    @property
    def padded(self) -> int:
        """Numbers of all slices."""
        return self.each * self.members

    def span(self, payload: int) -> range:
        """The members whose slices have something of a payload.

        Arguments:
            payload: its index.
        """
        first, last = self.starts[payload], self.starts[payload + 1]
        return range(first // self.each, -(-last // self.each)) if last > first else range(0)

    def overlap(self, payload: int, member: int) -> Overlap:
        """What a slice has of a payload, perhaps nothing.

        Arguments:
            payload: its index.
            member: index of the slice.
        """
        first, last = self.starts[payload], self.starts[payload + 1]
        begin = member * self.each
        start = min(max(first, begin), last)
        stop = max(start, min(last, begin + self.each))
        return Overlap(member, start - first, stop - first, start - begin)

    def of_member(self, member: int) -> Iterator[tuple[int, Overlap]]:
        """The payloads of which a slice has something, each with what it has.

        Arguments:
            member: index of the slice.
        """
        for payload in range(len(self.lengths)):
            if member in self.span(payload):
                yield payload, self.overlap(payload, member)
