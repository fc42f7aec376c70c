"""The arrows between the rooms of src/natgrad point down only, and each room keeps to its rules."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "natgrad"
LONGEST = 350

# From the bottom up. A room may import those below its own floor, never its neighbours on it.
FLOORS = (
    ("errors", "tables", "lazy", "routines"),
    ("specs", "checks"),
    ("schedules", "loss_scale", "damping"),
    ("linalg",),
    ("layers", "inverses", "curvature"),
    ("structures", "comm", "placement", "geometry"),
    ("lengths",),
    ("capture",),
    ("kfac",),
    ("preconditioner", "operators"),
    ("measures", "optimizer", "least_squares"),
    ("__init__",),
    ("integrations",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Inside of the laboratory and of kfac arrows point down as well.
INNER_FLOORS = {
    "lab": (
        ("calls", "marks"),
        ("registry",),
        ("data", "models", "schemes"),
        ("names",),
        ("train",),
        ("compare",),
        ("report",),
        ("reproduce",),
    ),
    "kfac": (("clocks", "settings", "step", "clipping", "motion"), ("ranks",)),
}
WITHOUT_TORCH = ("placement", "specs", "routines", "tables", "checks")


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that is imported; `package` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def runtime(tree: ast.Module) -> ast.Module:
    """Without what only type checkers read. A package names its lazy submodules there, also those
    of rooms above it, and imports none of them."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def touches_torch_distributed(tree: ast.Module) -> Iterator[int]:
    """Lines with an attribute `torch.distributed`, as in `torch.distributed.all_reduce(...)`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield node.lineno


def room_of_import(name: str, public: frozenset[str]) -> str:
    """The room a dotted name below `natgrad` lies in; a public name lies in `__init__`."""
    parts = name.split(".")
    if len(parts) == 1 or parts[1] in public or parts[1] == "*":
        return "__init__"
    return parts[1]


def inner_floor(room: str, name: str) -> int | None:
    """The floor of a file or folder inside of a room; None where the room has no floors for it."""
    for floor, names in enumerate(INNER_FLOORS.get(room, ())):
        if name in names:
            return floor
    return None


def violations(source: str, path: str, public: frozenset[str] = frozenset()) -> list[str]:
    """What a file, at `path` relative to src/natgrad, does against the rules."""
    *folders, file = path.split("/")
    room = folders[0] if folders else file.removesuffix(".py")
    if room not in FLOOR_OF:
        return [f"{path}: no floor is given to the room '{room}'; add it to FLOORS"]
    tree = ast.parse(source, path)
    if path == "__init__.py":
        tree = runtime(tree)
    found = []
    inner = (*folders[1:], file.removesuffix(".py"))[0]
    for line, name in imports(tree, ("natgrad", *folders)):
        top = name.split(".")[0]
        if top == "natgrad":
            target = room_of_import(name, public)
            if target == room:
                here, there = inner_floor(room, inner), inner_floor(room, name.split(".")[2])
                if here is not None and there is not None and there > here:
                    found.append(f"{path}:{line}: {inner} must not import {name}")
            elif target not in FLOOR_OF:
                found.append(f"{path}:{line}: '{name}' is in no known room")
            elif FLOOR_OF[target] >= FLOOR_OF[room]:
                found.append(f"{path}:{line}: {room} must not import {target}")
        elif top == "torch" and room in WITHOUT_TORCH:
            found.append(f"{path}:{line}: {room} must not import torch")
        if name.startswith("torch.distributed") and room != "comm":
            found.append(f"{path}:{line}: torch.distributed belongs to comm")
    if room != "comm":
        found += [
            f"{path}:{line}: torch.distributed belongs to comm"
            for line in touches_torch_distributed(tree)
        ]
    if (length := len(source.splitlines())) > LONGEST:
        found.append(f"{path}: {length} lines, the limit is {LONGEST}")
    return found


def sources() -> Iterator[tuple[str, str]]:
    """Path relative to src/natgrad, and text, of every file."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8")


def public_names() -> frozenset[str]:
    """Names that `from natgrad import ...` takes from `__init__` and not from a room."""
    init = PACKAGE / "__init__.py"
    tree = ast.parse(init.read_text(encoding="utf-8"))
    names = (name.rpartition(".")[2] for _, name in imports(tree, ("natgrad",)))
    return frozenset(names) - FLOOR_OF.keys()


def test_every_file_keeps_to_the_rules():
    public = public_names()
    assert [problem for path, text in sources() for problem in violations(text, path, public)] == []


def test_tests_mirror_the_rooms():
    unit = Path(__file__).parent / "unit"
    folders = {f.relative_to(unit) for f in unit.rglob("*") if f.is_dir() and f.name[0] != "_"}
    assert sorted(str(f) for f in folders if not (PACKAGE / f).is_dir()) == []


def test_the_checker_finds_what_is_wrong_and_nothing_else():
    public = frozenset({"KFAC"})
    wrong = {
        ("linalg/x.py", "from natgrad.capture import hooks"): "linalg must not import capture",
        ("linalg/x.py", "from ..capture.hooks import y"): "linalg must not import capture",
        ("linalg/x.py", "def f():\n    import natgrad.layers"): "x.py:2: linalg must not",
        ("layers/x.py", "from natgrad.curvature import y"): "layers must not import curvature",
        ("kfac/x.py", "from natgrad import KFAC"): "kfac must not import __init__",
        ("kfac/x.py", "import natgrad"): "kfac must not import __init__",
        ("kfac/x.py", "from natgrad import preconditioner"): "must not import preconditioner",
        ("kfac/x.py", "from natgrad.nowhere import y"): "'natgrad.nowhere.y' is in no known",
        ("measures/x.py", "from natgrad.lab import data"): "measures must not import lab",
        ("integrations/x.py", "from natgrad.lab import data"): "integrations must not import lab",
        ("lab/data/x.py", "from natgrad.lab.train import y"): "data must not import",
        ("lab/data/x.py", "from natgrad.lab.names import DATA"): "data must not import",
        ("lab/train/x.py", "from natgrad.lab.compare import y"): "train must not import",
        ("kfac/x.py", "import torch.distributed as dist"): "belongs to comm",
        ("kfac/x.py", "from torch import distributed"): "belongs to comm",
        ("kfac/x.py", "import torch\ntorch.distributed.barrier()"): "x.py:2: torch.distr",
        ("placement/x.py", "import torch"): "placement must not import torch",
        ("specs.py", "from torch import Tensor"): "specs must not import torch",
        ("attic/x.py", ""): "no floor is given to the room 'attic'",
        ("__init__.py", "from natgrad import lab"): "__init__ must not import lab",
        ("kfac/x.py", "if TYPE_CHECKING:\n    import natgrad.lab"): "must not import lab",
        ("layers/x.py", "\n" * 351): "351 lines, the limit is 350",
    }
    for (path, source), complaint in wrong.items():
        (found,) = violations(source, path, public)
        assert complaint in found
    right = {
        "kfac/x.py": "from natgrad.linalg.forms import Form\nfrom .clocks import y\nimport torch",
        "linalg/x.py": "from natgrad.errors import y\nfrom natgrad import checks",
        "comm/x.py": "import torch.distributed as d\nimport torch\ntorch.distributed.barrier()",
        "cli/x.py": "import natgrad\nfrom natgrad.lab.train import loop",
        "lab/train/x.py": "import natgrad\nfrom natgrad.lab.data import loader",
        "placement/x.py": "from natgrad.specs import BlockSpec\nimport torchless",
        "__init__.py": "from natgrad.kfac import x\nif TYPE_CHECKING:\n    from natgrad import lab",
    }
    assert [p for path, source in right.items() for p in violations(source, path, public)] == []
