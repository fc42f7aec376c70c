"""Several optimizers on one task: as many trials for each, several seeds, and who is first."""

from natgrad.train.comparison.contender import CONTENDERS, Contender, contenders
from natgrad.train.comparison.course import compare
from natgrad.train.comparison.question import Question
from natgrad.train.comparison.results import Comparison
from natgrad.train.comparison.summary import sentences, table

__all__ = [
    "CONTENDERS",
    "Comparison",
    "Contender",
    "Question",
    "compare",
    "contenders",
    "sentences",
    "table",
]
