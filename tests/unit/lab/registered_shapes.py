"""Objects that tests name as module:function."""

from dataclasses import dataclass

NUMBER = 3


@dataclass(frozen=True)
class Shape:
    sides: int = 3


class Square(Shape):
    def __init__(self) -> None:
        super().__init__(4)


def needs(sides: int) -> Shape:
    return Shape(sides)


def hexagon() -> Shape:
    return Shape(6)


def number() -> int:
    return 3


SOME = Shape(7)


def rising(step: int) -> int:
    """An interval of a user's own, in steps."""
    return 1 + step // 3


class Rising:
    """The same, with a number of its own."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, step: int) -> int:
        return 1 + step // self.by
