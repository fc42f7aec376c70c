"""The fixture that runs a function on several ranks."""

import pytest

from distributed.world import World


@pytest.fixture(scope="session")
def world(pytestconfig):
    """``world.run(function, *args, ranks=3)`` gives what the function returns on each rank."""
    world = World(pytestconfig.getini("filterwarnings"))
    yield world
    world.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "world" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
