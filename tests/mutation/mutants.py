"""Small wrong changes of a source file: where they can be made, and the file with one of them.

mutmut and cosmic-ray were not taken: both start an interpreter for every mutant, of which importing
torch and collecting tests takes longer than most tests. Here both are done once, and a mutant is
put into a forked process (`mutation.swapping`).
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.MatMult: ast.Mult,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max"}
METHODS = {"min": "max", "max": "min", "sum": "mean", "mean": "sum", "add_": "sub_", "mul_": "div_"}


@dataclass(frozen=True)
class Mutant:
    """The ``index``-th change that can be made in a file; ``line`` and ``what`` say which it is."""

    file: str
    index: int
    line: int
    what: str


def mutants_of(root: Path, file: str) -> list[Mutant]:
    tree = ast.parse((root / file).read_text())
    return [Mutant(file, i, node.lineno, what) for i, (node, what, _) in enumerate(changes(tree))]


def mutated(root: Path, mutant: Mutant) -> str:
    """The source with that change."""
    return ast.unparse(mutated_tree(root, mutant))


def mutated_tree(root: Path, mutant: Mutant) -> ast.Module:
    """Its tree, in which all has the line that it had."""
    tree = ast.parse((root / mutant.file).read_text())
    for index, (_, _, change) in enumerate(changes(tree)):
        if index == mutant.index:
            change()
            break
    return ast.fix_missing_locations(tree)


def changes(tree: ast.Module) -> Iterator[tuple[ast.expr, str, object]]:
    """Every place with a function that changes it there."""
    for node in walk(tree):
        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                if type(op) in COMPARED:
                    new = COMPARED[type(op)]
                    yield node, f"{type(op).__name__} -> {new.__name__}", setter(node.ops, i, new())
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            new = COMPUTED[type(node.op)]
            yield node, f"{type(node.op).__name__} -> {new.__name__}", attribute(node, "op", new())
        elif isinstance(node, ast.BoolOp):
            new = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield node, f"-> {new.__name__}", attribute(node, "op", new())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "without not", replaced(node, node.operand)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, "without minus", replaced(node, node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield (
                node,
                f"{node.value} -> {not node.value}",
                attribute(node, "value", not node.value),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            new_value = node.value + 1 if isinstance(node.value, int) else node.value * 2 + 0.5
            yield node, f"{node.value} -> {new_value}", attribute(node, "value", new_value)
        elif isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in CALLED:
                yield (
                    node,
                    f"{name.id} -> {CALLED[name.id]}",
                    attribute(name, "id", CALLED[name.id]),
                )
            elif isinstance(name, ast.Attribute) and name.attr in METHODS:
                new_name = METHODS[name.attr]
                yield node, f".{name.attr} -> .{new_name}", attribute(name, "attr", new_name)
        elif isinstance(node, ast.IfExp):
            yield node, "branches swapped", swapped(node)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All expressions that are computed: not annotations, errors, slots of types, or the
    ``strict`` of zip, which asserts what holds."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("__all__", "T"):
        return
    yield node
    skipped = {"annotation", "returns", "decorator_list", "type_params"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def setter(ops: list[ast.cmpop], index: int, new: ast.cmpop) -> object:
    def change() -> None:
        ops[index] = new

    return change


def attribute(node: ast.AST, name: str, value: object) -> object:
    return lambda: setattr(node, name, value)


def replaced(node: ast.AST, other: ast.AST) -> object:
    def change() -> None:
        inner = copy.deepcopy(other)
        node.__class__ = inner.__class__  # type: ignore[assignment]
        node.__dict__.clear()
        node.__dict__.update(inner.__dict__)

    return change


def swapped(node: ast.IfExp) -> object:
    def change() -> None:
        node.body, node.orelse = node.orelse, node.body

    return change
