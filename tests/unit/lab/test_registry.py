"""Names stand for one object each, and import paths for those of the user's."""

import pytest

from natgrad.errors import SettingError
from natgrad.lab import names, registry
from natgrad.lab.registry import Registry, factories, is_path
from unit.lab.registered_shapes import Shape, Square

HERE = "unit.lab.registered_shapes"
SHAPES = factories("shape", Shape, {"triangle": Shape, "square": Square})


def test_names_stand_for_what_was_registered():
    found = Registry("word", "a word of your own", lambda path, found: found, {"a": 1})
    assert found.add("b", 2) == 2
    assert (list(found), found["a"], found["b"]) == (["a", "b"], 1, 2)
    assert "a" in found
    assert f"{HERE}:NUMBER" not in found
    assert found[f"{HERE}:NUMBER"] == 3
    assert found.help() == "a, b, or module:function"


def test_functions_classes_and_objects_by_their_path():
    assert SHAPES["square"]().sides == 4
    assert [SHAPES[f"{HERE}:{name}"]().sides for name in ("hexagon", "Square", "SOME")] == [6, 4, 7]


def test_nothing_is_imported_to_check_a_name():
    SHAPES.check("nowhere:at_all")
    assert is_path("nowhere:at_all")
    assert not any(is_path(text) for text in ("", "a", "a:", ":a"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "circle",
            "There is no shape 'circle': name one of triangle, square, or a Shape of your own as "
            "module:function.",
        ),
        (
            "nowhere:circle",
            "Shape 'nowhere:circle' cannot be imported (No module named 'nowhere'): name a "
            "function that Python finds from here, as module:function.",
        ),
        (
            f"{HERE}:NUMBER",
            f"Shape '{HERE}:NUMBER' is of type int but must be a function that returns a Shape: "
            "name one as module:function.",
        ),
        (
            f"{HERE}:needs",
            f"Shape '{HERE}:needs' could not be built (TypeError: needs() missing 1 required "
            "positional argument: 'sides'): name a function that takes no arguments and returns a "
            "Shape.",
        ),
        (
            f"{HERE}:number",
            f"Shape '{HERE}:number' gives an object of type int but must give a Shape: name a "
            "function that returns one.",
        ),
    ],
)
def test_what_is_refused(name, message):
    with pytest.raises(SettingError) as error:
        SHAPES[name]()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "why"), [("a", "stands for another one already"), ("a:b", "cannot be one")]
)
def test_names_that_cannot_be_registered(name, why):
    found = Registry("word", "one", lambda path, found: found, {"a": 1})
    with pytest.raises(SettingError) as error:
        found.add(name, 2)
    assert str(error.value) == f"The name {name!r} of a word {why}: register it by another."


EVERY = {
    name: one for name, one in vars(names).items() if isinstance(one, Registry) and name.isupper()
}


def test_what_has_names():
    kinds = {"STRUCTURES", "INVERSES", "PLACEMENTS", "CURVATURES", "OPTIMIZERS", "NETWORKS"}
    kinds |= {"DATA", "LOSSES", "TASK_LOSSES", "LAYERS", "INTERVALS", "DAMPINGS", "GEOMETRIES"}
    assert kinds | {"LENGTHS", "SUBSAMPLES", "SECOND_PASSES"} == set(EVERY)


@pytest.mark.parametrize("kind", EVERY)
def test_every_wrong_name_is_answered_with_all_right_ones(kind):
    found = EVERY[kind]
    with pytest.raises(SettingError) as error:
        found["no such name"]
    said = str(error.value)
    assert said.startswith(f"There is no {found.kind} 'no such name': name one of ")
    assert all(name in said for name in found)
    assert said.endswith(f" as {registry.PATH}.")


def test_layers_are_those_that_were_registered():
    assert {"Linear", "Conv2d", "Embedding"} <= set(names.LAYERS)
    assert names.LAYERS["Linear"].__name__ == "Linear"


def test_structures_and_inverses_of_ones_own():
    made = names.STRUCTURES["natgrad.structures:Diagonal"]()
    assert type(made).__name__ == "Diagonal"
    assert type(names.INVERSES["natgrad.inverses:Cholesky"]()).__name__ == "Cholesky"
    strategy = names.PLACEMENTS["natgrad.placement:MemOpt"](names.PlacementRequest())
    assert type(strategy).__name__ == "MemOpt"
    fisher = names.CURVATURES["natgrad.curvature.fisher:EmpiricalFisher"](names.CurvatureRequest())
    assert type(fisher).__name__ == "EmpiricalFisher"
