"""Python's search for cycles of objects, left out where nothing would be found.

It goes through all objects whenever enough new ones are there: a fifth of the time of a plan, whose
objects all stay or are freed without it, as are those of modules while they are imported.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """For what is done inside, or, as a decorator, in a function; then as before."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
