"""The rooms that mutants are taken of, and the tests that are to notice a change of each."""

import shutil
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src" / "natgrad"
ROOMS = {
    "linalg": ["unit/linalg"],
    "layers": ["contracts/test_layers.py", "contracts/test_recurrent.py", "unit/layers"],
    "curvature": ["unit/curvature"],
    "structures": [
        "unit/structures",
        "contracts/test_structures.py",
        "contracts/test_geometry.py",
    ],
    "inverses": ["unit/inverses", "contracts/test_inverses.py"],
    "geometry": ["unit/geometry", "contracts/test_geometry.py", "test_invariance.py"],
    "lengths": ["unit/lengths", "contracts/test_geometry.py", "unit/kfac/test_blending.py"],
    "schedules": ["unit/test_schedules.py", "unit/kfac/test_clocks.py"],
    "capture": ["unit/capture", "test_compat.py", "test_robustness.py"],
    "kfac": [
        "unit/kfac",
        "unit/test_errors.py",
        "test_invariance.py",
        "test_state.py",
        "test_robustness.py",
        "distributed",
    ],
    "placement": ["unit/placement", "distributed/test_memory.py", "distributed/test_bytes.py"],
    "comm": ["unit/comm", "distributed"],
}
# What a command that may not be there starts.
NEEDS = {"comm/mpi.py": "mpirun"}


def sources_of(room: str) -> list[str]:
    """The files of a room, as mutants name them, of which some tests can be run here."""
    found = sorted(str(path.relative_to(SOURCES)) for path in (SOURCES / room).rglob("*.py"))
    return [file for file in found if file not in NEEDS or shutil.which(NEEDS[file])]


def belongs(nodeid: str, room: str) -> bool:
    """Whether a test is one of those that are to notice changes of a room."""
    file = Path(nodeid.partition("::")[0]).relative_to(TESTS.name)
    return any(file.is_relative_to(own) for own in ROOMS[room])
