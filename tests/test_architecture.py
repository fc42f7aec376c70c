"""The arrows between the rooms of src/natgrad point down only, and each room keeps to its rules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "natgrad"
LONGEST = 350

# From the bottom up. A room may import those below its own floor, never its neighbours on it.
FLOORS = (
    ("errors", "tables"),
    ("specs",),
    ("linalg",),
    ("layers", "inverses", "curvature"),
    ("structures", "comm", "placement"),
    ("runtime",),
    ("preconditioner", "operators", "schemes"),
    ("measures",),
    ("__init__",),
    ("models", "data", "integrations"),
    ("train",),
    ("report",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

WITHOUT_TORCH = ("placement", "specs", "tables")
SOURCES = sorted(PACKAGE.rglob("*.py"))


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


def violations(source: str, path: str, public: frozenset[str] = frozenset()) -> list[str]:
    """What a file, at `path` relative to src/natgrad, does against the rules."""
    *folders, file = path.split("/")
    room = folders[0] if folders else file.removesuffix(".py")
    if room not in FLOOR_OF:
        return [f"{path}: no floor is given to the room '{room}'; add it to FLOORS"]
    tree = ast.parse(source, path)
    found = []
    for line, name in imports(tree, ("natgrad", *folders)):
        top = name.split(".")[0]
        if top == "natgrad":
            target = room_of_import(name, public)
            if target == room:
                continue
            if target not in FLOOR_OF:
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


def by_kind(name: str) -> tuple[bool, bool, str]:
    """Ruff's order of `__all__`: capitals, then classes, then functions."""
    return not name.isupper(), not name[0].isupper(), name


def init_violations(source: str) -> list[str]:
    """The top `__init__.py` is a docstring, imports, and a sorted `__all__` of what they bring."""
    found, imported, public = [], set(), None
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
        ):
            public = ast.literal_eval(node.value)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            found.append(f"line {node.lineno} is neither an import nor __all__")
    if public is None:
        return [*found, "there is no __all__"]
    if list(public) != (right := sorted(public, key=by_kind)):
        found.append(f"__all__ is not sorted; it should read {right}")
    if set(public) != imported:
        found.append(f"__all__ and the imports differ in {sorted(set(public) ^ imported)}")
    return found


def public_names() -> frozenset[str]:
    """Names that `from natgrad import ...` takes from `__init__` and not from a room."""
    init = PACKAGE / "__init__.py"
    tree = ast.parse(init.read_text(encoding="utf-8"))
    names = (name.rpartition(".")[2] for _, name in imports(tree, ("natgrad",)))
    return frozenset(names) - FLOOR_OF.keys()


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_source(file):
    path = file.relative_to(PACKAGE).as_posix()
    assert not violations(file.read_text(encoding="utf-8"), path, public_names())


def test_the_top_holds_only_public_names():
    assert not init_violations((PACKAGE / "__init__.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("linalg/x.py", "from natgrad.runtime import capture", "linalg must not import runtime"),
        ("linalg/x.py", "from ..runtime.capture import y", "linalg must not import runtime"),
        ("linalg/x.py", "def f():\n    import natgrad.layers", "x.py:2: linalg must not"),
        ("layers/x.py", "from natgrad.curvature import y", "layers must not import curvature"),
        ("runtime/x.py", "from natgrad import KFAC", "runtime must not import __init__"),
        ("runtime/x.py", "import natgrad", "runtime must not import __init__"),
        ("runtime/x.py", "from natgrad import preconditioner", "must not import preconditioner"),
        ("runtime/x.py", "from natgrad.nowhere import y", "'natgrad.nowhere.y' is in no known"),
        ("runtime/x.py", "import torch.distributed as dist", "belongs to comm"),
        ("runtime/x.py", "from torch import distributed", "belongs to comm"),
        ("runtime/x.py", "import torch\ntorch.distributed.barrier()", "x.py:2: torch.distr"),
        ("placement/x.py", "import torch", "placement must not import torch"),
        ("specs.py", "from torch import Tensor", "specs must not import torch"),
        ("attic/x.py", "", "no floor is given to the room 'attic'"),
        ("layers/x.py", "\n" * 351, "351 lines, the limit is 350"),
    ],
)
def test_the_checker_finds(path, source, complaint):
    (found,) = violations(source, path, frozenset({"KFAC"}))
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/x.py", "from natgrad.linalg.kronecker import solve\nfrom .capture import y"),
        ("runtime/x.py", "from natgrad import errors"),
        ("linalg/x.py", "from natgrad.errors import y\nimport torch"),
        (
            "comm/x.py",
            "import torch.distributed as dist\nimport torch\ntorch.distributed.barrier()",
        ),
        ("cli/x.py", "import natgrad\nfrom natgrad.train import loop"),
        ("placement/x.py", "from natgrad.specs import BlockSpec\nimport torchless"),
        ("__init__.py", "from natgrad.preconditioner import KFAC"),
    ],
)
def test_the_checker_allows(path, source):
    assert not violations(source, path, frozenset({"KFAC"}))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from natgrad.a import b, a\n__all__ = ['b', 'a']", "not sorted"),
        ("from natgrad.a import Ab, B\n__all__ = ['Ab', 'B']", "should read ['B', 'Ab']"),
        ("from natgrad.a import a, b\n__all__ = ['a']", "differ in ['b']"),
        ("from natgrad.a import a\nx = 1\n__all__ = ['a']", "line 2 is neither"),
        ("from natgrad.a import a", "there is no __all__"),
    ],
)
def test_the_checker_of_the_top_finds(source, complaint):
    (found,) = init_violations(source)
    assert complaint in found
