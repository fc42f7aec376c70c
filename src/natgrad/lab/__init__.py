"""The laboratory around the library: data, networks, training runs, comparisons and their pages."""

from typing import TYPE_CHECKING

from natgrad.lazy import lazily

if TYPE_CHECKING:
    from natgrad.lab import compare as compare
    from natgrad.lab import data as data
    from natgrad.lab import models as models
    from natgrad.lab import report as report
    from natgrad.lab import schemes as schemes
    from natgrad.lab import train as train
else:
    __getattr__, __dir__ = lazily(
        __name__, modules=("compare", "data", "models", "report", "schemes", "train")
    )

__all__ = ["compare", "data", "models", "report", "schemes", "train"]
