"""Several optimizers on one task: as many trials for each, several seeds, and who is first.

Which run comes next, and with which learning rate, is a function of the runs that have ended, which
are in ``results.json`` (`natgrad.lab.compare.next_run`). So a comparison can be interrupted
anywhere, and all ranks agree without asking. The seeds of all optimizers are run in turns, so that
a machine that becomes slower does so for all of them.
"""

from natgrad.lab.compare.contender import CONTENDERS, Contender, contender_of
from natgrad.lab.compare.own_task import compare_own
from natgrad.lab.compare.results import Comparison
from natgrad.lab.compare.runner import compare
from natgrad.lab.compare.setup import ComparisonSetup
from natgrad.lab.compare.summary import sentences, table

__all__ = [
    "CONTENDERS",
    "Comparison",
    "ComparisonSetup",
    "Contender",
    "compare",
    "compare_own",
    "contender_of",
    "sentences",
    "table",
]
