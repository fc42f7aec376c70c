"""The pages of the reference: which names are public, and where each is explained.

Sources are parsed and never imported, so that a site can be built without torch.
"""

import ast
import re
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
# What one trains with has a page of its own, before the rooms. (The rest of natgrad's own names are
# explained in their rooms.)
TRAINING = {
    "natgrad.KFAC": "natgrad.preconditioner.KFAC",
    "natgrad.NaturalMuon": "natgrad.optimizer.NaturalMuon",
    "natgrad.least_squares.LeastSquares": "natgrad.least_squares.LeastSquares",
    "natgrad.Relative": "natgrad.damping.Relative",
    "natgrad.MeanLoss": "natgrad.loss_scale.MeanLoss",
    "natgrad.SumLoss": "natgrad.loss_scale.SumLoss",
    "natgrad.Distributed": "natgrad.kfac.ranks.distributed.Distributed",
}
ROOMS = (
    "natgrad.layers",
    "natgrad.curvature",
    "natgrad.structures",
    "natgrad.inverses",
    "natgrad.geometry",
    "natgrad.lengths",
    "natgrad.placement",
    "natgrad.schedules",
    "natgrad.operators",
    "natgrad.measures",
    "natgrad.integrations",
    "natgrad.comm",
    "natgrad.errors",
    "natgrad.lab.compare",
    "natgrad.lab.data",
    "natgrad.lab.models",
    "natgrad.lab.schemes",
    "natgrad.lab.train",
)

Node = ast.Module | ast.ClassDef | ast.FunctionDef


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def first_sentence(node: Node) -> str:
    """Of a docstring, on one line, fit for a cell of a table."""
    said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    said = re.sub(r"(?<=\.) .*", "", said).rstrip(":")
    return said.replace("|", "\\|")


@cache
def module_file(module: str) -> Path | None:
    path = SOURCES / module.replace(".", "/")
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    return None


@cache
def public(module: str) -> tuple[str, ...]:
    """The names of its ``__all__``."""
    for node in parsed(_file(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__, from which its page is made: add one.")


def _file(module: str) -> Path:
    file = module_file(module)
    if file is None:
        raise ValueError(f"There is no module {module}: mend ROOMS in website/reference.py.")
    return file


@cache
def defined(module: str, name: str) -> tuple[str, Node] | None:
    """The full name under which something is defined, and where: through imports, if need be."""
    for node in ast.walk(parsed(_file(module))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return f"{module}.{name}", node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("natgrad"):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module != module:
                    return defined(str(node.module), alias.name)
    if module_file(f"{module}.{name}"):
        return f"{module}.{name}", parsed(_file(f"{module}.{name}"))
    return None


@cache
def _places() -> dict[str, str]:
    """The page and anchor of everything public, by full name where it is defined."""
    found: dict[str, str] = {}
    for name, path in TRAINING.items():
        found[path] = f"api/training.md#{name}"
    for room in ROOMS:
        for name in public(room):
            made = defined(room, name)
            if made is not None and isinstance(made[1], ast.ClassDef | ast.FunctionDef):
                found.setdefault(made[0], f"{page_of(room)}#{room}.{name}")
    return found


def place_of(path: str) -> str | None:
    """Where ``natgrad.path`` is in the site, such as ``api/inverses.md#natgrad.inverses.Eigen``;
    None if it has none. Of a method, that of its class."""
    parts = path.rstrip(".").split(".")
    room = "natgrad"
    while parts and module_file(f"{room}.{parts[0]}"):
        room = f"{room}.{parts.pop(0)}"
    if not parts:
        return page_of(room) if room in ROOMS else None
    made = defined(room, parts[0])
    return _places().get(made[0]) if made else None


def page_of(room: str) -> str:
    return f"api/{room.removeprefix('natgrad.')}.md"


def pages() -> dict[str, str]:
    """Markdown of every page of the reference, by its path in the site."""
    found = {"api/index.md": _index(), "api/training.md": _training()}
    for room in ROOMS:
        found[page_of(room)] = _room(room)
    return found


def _training() -> str:
    lines = ["# Training", "", "What stands in a training loop.", ""]
    for name in TRAINING:
        lines += [f"::: {name}", ""]
    return "\n".join(lines)


def _room(room: str) -> str:
    """The room's own docstring, and all that is public in it and not on another page."""
    lines = [f"# {room}", "", f"::: {room}", "    options:", "      members: []"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", ""]
    for name in public(room):
        made = defined(room, name)
        if made is None:
            continue  # a type, or a constant
        if isinstance(made[1], ast.Module):
            if room == "natgrad.integrations":
                lines += [f"::: {room}.{name}", ""]
        elif _places()[made[0]].endswith(f"#{room}.{name}"):
            lines += [f"::: {room}.{name}", ""]
    return "\n".join(lines)


def _index() -> str:
    lines = [
        "# Reference",
        "",
        "From the docstrings of the code. `import natgrad` brings these names:",
        "",
        "| | |",
        "|---|---|",
    ]
    for name in public("natgrad"):
        made = defined("natgrad", name)
        place = place_of(name)
        assert made is not None
        assert place is not None, f"natgrad.{name} is on no page of the reference."
        link = place.removeprefix("api/")
        lines.append(f"| [`natgrad.{name}`]({link}) | {first_sentence(made[1])} |")
    lines += ["", "Everything else is in a submodule, which loads when it is first used:", ""]
    lines += ["| | |", "|---|---|", "| [Training](training.md) | What stands in a training loop. |"]
    for room in ROOMS:
        link = page_of(room).removeprefix("api/")
        lines.append(f"| [`{room}`]({link}) | {first_sentence(parsed(_file(room)))} |")
    return "\n".join([*lines, ""])
