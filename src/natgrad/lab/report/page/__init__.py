"""One HTML page of runs and comparisons, complete in one file, and PNGs of its pictures."""

from natgrad.lab.report.page.assemble import write

__all__ = ["write"]
