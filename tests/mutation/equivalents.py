"""Mutants that change nothing that anybody could see, each with the reason.

They are no holes in the tests, and are left out of the score. A mutant is named by the text of its
line, so that the list outlives changes elsewhere; `test_equivalents` looks whether each is still
there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutation.mutants import Mutant, mutants_of


@dataclass(frozen=True)
class Equivalent:
    """The ``nth`` change of this kind (`Mutant.what`) in a file's line with this text."""

    file: str
    line: str
    what: str
    why: str
    nth: int = 0

    def found(self, root: Path) -> list[Mutant]:
        """The mutants that it means: one for each line with that text."""
        lines = (root / self.file).read_text().splitlines()
        alike: dict[int, list[Mutant]] = {}
        for one in mutants_of(root, self.file):
            if one.what == self.what and lines[one.line - 1].strip() == self.line:
                alike.setdefault(one.line, []).append(one)
        return [own[self.nth] for own in alike.values() if len(own) > self.nth]


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "kfac/refresh.py",
        "_LARGE = 2048",
        "2048 -> 2049",
        "how many matrices are decomposed at a time changes how long it takes, and no number",
    ),
    *(
        Equivalent(
            "capture/expert_views.py",
            "steps = [1, 1, 1]",
            "1 -> 2",
            "an axis that a view does not go along has one entry, whatever the step",
            nth,
        )
        for nth in range(3)
    ),
    Equivalent(
        "comm/horovod.py",
        "super().__init__(buffers[0].new_empty(0), dtype, failure, *buffers)",
        "0 -> 1",
        "the empty tensor is replaced by what Horovod gives, before anybody sees it",
        1,
    ),
    Equivalent(
        "comm/wire.py",
        'piece = _CACHED if device.type == "cpu" else max(1, size)',
        "Eq -> NotEq",
        "in how many pieces words are packed changes how long it takes, and no word",
    ),
    Equivalent(
        "placement/strategies/hybrid.py",
        "powers = [4**k for k in range((size.bit_length() + 1) // 2)]",
        "1 -> 2",
        "next to one more power of four is the number of ranks, which is there anyway",
    ),
    Equivalent(
        "layers/axes.py",
        "return torch.float32 if dtype.itemsize < 4 else dtype",
        "Lt -> LtE",
        "activations of four bytes are float32 already",
    ),
    Equivalent(
        "layers/behaviour.py",
        "if (module.padding_idx or 0) >= rows:",
        "0 -> 1",
        "there are more rows than one",
    ),
    Equivalent(
        "lengths/dogleg.py",
        "edge = torch.where(legs.both > 0, ahead, behind)",
        "Gt -> GtE",
        "both roots are the same where the legs are at right angles",
    ),
    Equivalent(
        "inverses/cholesky.py",
        "if matrix.shape[1] <= _SMALL:  # many tiny ones, as norm layers have, in one call",
        "1 -> 2",
        "the matrix is square",
    ),
    Equivalent(
        "linalg/correlation.py",
        "records = wide and c >= _RECORDS * width",
        "Mult -> Div",
        "records are another way to the same sums, which costs more or less time",
    ),
    Equivalent(
        "linalg/forms.py",
        "count = 1 if dim < 96 else 2 if dim < 192 else 4 if dim < 512 "
        "else 8 if dim < 2500 else 12",
        "4 -> 5",
        "into how many slabs a triangle is cut changes how long products take, and no entry of it",
    ),
    Equivalent(
        "inverses/low_rank.py",
        "d = matrix.shape[1]",
        "1 -> 2",
        "the matrix is square",
    ),
)


def equivalent(root: Path, files: Iterable[str]) -> dict[Mutant, str]:
    """Those of some files, with the reasons."""
    known = set(files)
    own = [one for one in EQUIVALENT if one.file in known]
    return {mutant: one.why for one in own for mutant in one.found(root)}
