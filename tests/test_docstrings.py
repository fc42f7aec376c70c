"""Every parameter of what is public is explained where a reader of the docstring looks for it."""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import natgrad

# What is checked: all of `__all__`, or of a module without one, all it defines.
ROOMS = (
    "natgrad",
    "natgrad.comm",
    "natgrad.curvature",
    "natgrad.inverses",
    "natgrad.kfac.ranks.distributed",
    "natgrad.lab.compare",
    "natgrad.lab.data",
    "natgrad.lab.models",
    "natgrad.lab.schemes",
    "natgrad.lab.train",
    "natgrad.layers",
    "natgrad.least_squares",
    "natgrad.loss_scale",
    "natgrad.measures",
    "natgrad.operators",
    "natgrad.placement",
    "natgrad.preconditioner",
    "natgrad.schedules",
    "natgrad.structures",
)
ENTRY = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): \S")
PASSED_ON = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explained(docstring: str | None) -> set[str]:
    """Names in the section ``Arguments:``, whose entries are ``name: text``, or ``a, b: text``."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    if "Arguments:" not in lines:
        return set()
    found, width = set(), 0
    for line in lines[lines.index("Arguments:") + 1 :]:
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            break  # the section has ended
        width = width or indent
        if line and indent == width:
            entry = ENTRY.match(line.strip())
            assert entry, f"'{line.strip()}' is no entry of the form 'name: text'"
            found |= {name.strip("*") for name in entry["names"].split(", ")}
    return found


def parameters(function: object) -> dict[str, inspect.Parameter]:
    if isinstance(function, EnumType):
        return {}  # its members are made where it is defined
    try:
        found = inspect.signature(function).parameters
    except ValueError:  # of a class that is written in C
        return {}
    return {n: p for n, p in found.items() if n not in ("self", "cls") and n[0] != "_"}


def methods(owner: type) -> Iterator[tuple[str, object]]:
    """Public ones of natgrad's, with their docstring or that of the base they are declared in."""
    for name in dir(owner):
        own = inspect.getattr_static(owner, name)
        function = own.__func__ if isinstance(own, classmethod | staticmethod) else own
        ours = getattr(function, "__module__", None) or ""
        if name[0] != "_" and isinstance(function, FunctionType) and ours.startswith("natgrad"):
            yield name, function


def bases(owner: type) -> list[type]:
    return [base for base in owner.__mro__ if base.__module__.startswith("natgrad")]


def problems(name: str, signature: object, docstrings: list[str | None]) -> Iterator[str]:
    """``docstrings``: the own one, and those of bases that may explain what is inherited."""
    taken = parameters(signature)
    known = set().union(*map(explained, docstrings))
    for parameter, what in taken.items():
        if parameter not in known and what.kind not in PASSED_ON:
            yield f"{name} does not explain {parameter}"
    for stale in sorted(explained(docstrings[0]) - taken.keys()):
        yield f"{name} explains {stale}, which it does not take"


def undocumented(name: str, thing: object) -> Iterator[str]:
    if inspect.isclass(thing):
        yield from problems(name, thing, [base.__dict__.get("__doc__") for base in bases(thing)])
        for method, function in methods(thing):
            inherited = (base.__dict__.get(method) for base in bases(thing))
            docs = [function.__doc__, *(getattr(one, "__doc__", None) for one in inherited)]
            yield from problems(f"{name}.{method}", function, docs)
    elif isinstance(thing, FunctionType):
        yield from problems(name, thing, [thing.__doc__])


def public(room: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(room)
    if hasattr(module, "__all__"):
        yield from ((name, getattr(module, name)) for name in module.__all__)
    else:
        for name, thing in vars(module).items():
            if name[0] != "_" and getattr(thing, "__module__", None) == room:
                yield name, thing


@pytest.mark.parametrize("room", ROOMS)
def test_every_parameter_is_explained(room):
    found = [p for name, thing in public(room) for p in undocumented(f"{room}.{name}", thing)]
    assert found == []


def test_the_reader_of_docstrings():
    text = """First line.

    Arguments:
        one: this, and
            name: not an entry
        two, three: that

        **rest: of them

    other: not in the section
    """
    assert explained(text) == {"one", "two", "three", "rest"}
    assert explained("one: this") == explained(None) == set()
    with pytest.raises(AssertionError, match="'just words' is no entry"):
        explained("x\n\nArguments:\n    just words")


class Base:
    """Some words.

    Arguments:
        size: of it.
    """

    __module__ = "natgrad.made_up"

    def __init__(self, size, *rest):
        pass

    def grow(self, by, _hidden=0):
        """Some words.

        Arguments:
            by: how much.
        """

    grow.__module__ = "natgrad.made_up"


class Child(Base):
    """Its own words.

    Arguments:
        weight: of something else.
    """

    __module__ = "natgrad.made_up"

    def grow(self, by, until):
        pass

    grow.__module__ = "natgrad.made_up"


def test_the_checker_finds_what_is_missing_and_nothing_else():
    assert list(undocumented("Child", Child)) == [
        "Child explains weight, which it does not take",
        "Child.grow does not explain until",
    ]


# The top level.


def test_few_names_at_the_top():
    assert len(natgrad.__all__) <= 40
    assert len(set(natgrad.__all__)) == len(natgrad.__all__)
    assert set(natgrad.__all__) <= set(dir(natgrad))


def asked(expression: str) -> str:
    """What a fresh process says that has imported natgrad and nothing else."""
    command = [sys.executable, "-c", f"import sys, natgrad; print({expression})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_submodules_load_on_first_use():
    rooms = [
        "comm",
        "curvature",
        "errors",
        "integrations.deepspeed",
        "inverses",
        "layers",
        "measures",
        "operators",
        "placement",
        "schedules",
        "structures",
        "lab.compare",
        "lab.data",
        "lab.models",
        "lab.report",
        "lab.schemes",
        "lab.train",
    ]
    asking = ", ".join(f"natgrad.{room}.__name__" for room in rooms)
    found = asked(f"hasattr(natgrad, 'nowhere'), {asking}, sep=' '")
    assert found == " ".join(["False", *(f"natgrad.{room}" for room in rooms)])
    loaded = asked("*(m for m in sys.modules if m.startswith('natgrad.'))").split()
    for room in ("lab", "measures", "operators", "integrations", "cli"):
        assert not [module for module in loaded if module.startswith(f"natgrad.{room}")]


def test_every_listed_name_is_there():
    for name in dir(natgrad):
        thing = getattr(natgrad, name)
        if isinstance(thing, ModuleType) and hasattr(thing, "__all__"):
            assert all(hasattr(thing, each) for each in thing.__all__), name


def test_one_source_of_the_version():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{natgrad.__version__}"\n' in text
