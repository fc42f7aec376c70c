"""The variants that the documents show how to write, tested as they are written there."""

from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


@cache
def page(name: str) -> dict[str, Any]:
    """The names that a page's first blocks of Python define, up to where it uses them."""
    namespace: dict[str, Any] = {"__name__": __name__}  # where other processes find them
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for block in text.split("```python\n")[1:]:
        source = block.split("```")[0]
        if "torch.manual_seed" in source:
            break
        exec(compile(source, f"{name}.md", "exec"), namespace)
    return namespace


LowRank = page("own_inverse")["LowRank"]
NewtonSchulz = page("own_inverse")["NewtonSchulz"]
InputsOnly = page("own_structure")["InputsOnly"]
# Of full rank on everything that tests are small enough for, and so exact.
OWN_INVERSES = [NewtonSchulz(), LowRank(1000)]
