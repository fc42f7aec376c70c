"""A mutant put into the library as it is imported: the code of its function is exchanged.

A mutated file is compiled as a whole, with the lines that it has. If it differs from the right one
in the body of a function alone, every function with the right code gets the wrong one: those that
other modules have imported, too, and those that wait inside of decorators and closures. What
differs in a module's or a class's own code, such as a constant or a default, has had its effect
when it was imported, and must be imported anew.
"""

import ast
import functools
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from mutation.mutants import Mutant, mutated_tree


@dataclass(frozen=True)
class Difference:
    """Two codes that differ: in what they do ``itself``, or only in functions that they contain."""

    right: CodeType
    wrong: CodeType
    itself: bool

    @property
    def is_function(self) -> bool:
        """Not a module or the body of a class."""
        return bool(self.right.co_flags & inspect.CO_OPTIMIZED)


def differences(root: Path, mutant: Mutant) -> list[Difference]:
    """From the module inwards."""
    path = root / mutant.file
    right = ast.parse(path.read_text())
    codes = [
        compile(tree, str(path), "exec", dont_inherit=True)
        for tree in (right, mutated_tree(root, mutant))
    ]
    return list(_differing(*codes))


def place_of(root: Path, mutant: Mutant) -> str | None:
    """The innermost function around a mutant, as `mutation.reached` names it, if there is one."""
    own = [one for one in differences(root, mutant) if one.itself]
    return f"{mutant.file}:{own[-1].right.co_qualname}" if own and own[-1].is_function else None


class Library:
    """The functions of a library that this process has imported from a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.functions: dict[str, list[FunctionType]] = {}
        self.caches = []
        gc.unfreeze()  # what is frozen is not listed
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(f"{root}/"):
                self.functions.setdefault(one.__code__.co_filename, []).append(one)
            elif type(one) is functools._lru_cache_wrapper:
                code = getattr(one.__wrapped__, "__code__", None)
                if code is not None and code.co_filename.startswith(f"{root}/"):
                    self.caches.append(one)
        gc.freeze()

    def swap(self, mutant: Mutant) -> bool:
        """Put it into this process; False, and nothing has changed, where that cannot be done."""
        found = differences(self.root, mutant)
        outer = [one for one in found if one.is_function]
        if not outer or any(one.itself and not one.is_function for one in found):
            return False
        known = self.functions.get(str(self.root / mutant.file), [])
        pairs = [(own, one) for one in outer for own in known if own.__code__ == one.right]
        if not any(one is outer[0] for _, one in pairs):
            return False  # it was called when its module was imported, and is gone
        if any(one.right.co_freevars != one.wrong.co_freevars for one in outer):
            return False
        for own, one in pairs:
            own.__code__ = one.wrong
        for cache in self.caches:
            cache.cache_clear()
        return True


def _differing(right: CodeType, wrong: CodeType) -> Iterator[Difference]:
    if right == wrong:
        return
    inner = [
        [one for one in code.co_consts if isinstance(one, CodeType)] for code in (right, wrong)
    ]
    same = [_place(one) for one in inner[0]] == [_place(one) for one in inner[1]]
    yield Difference(right, wrong, _itself(right) != _itself(wrong) or not same)
    if same:  # otherwise they have changed places
        for a, b in zip(*inner, strict=True):
            yield from _differing(a, b)


def _itself(code: CodeType) -> CodeType:
    """Without the functions inside."""
    kept = (None if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(kept))


def _place(code: CodeType) -> tuple[object, ...]:
    return code.co_qualname, code.co_firstlineno, next(code.co_positions(), None)
