"""Tables and findings of the papers, measured again: `natgrad reproduce NAME`.

An item is a class in a file of its own: what the paper printed, a setting that runs here, the
cluster's own as a command, and what the paper says in words as checks. Add it to `ITEMS`.
"""

from natgrad.lab.reproduce.approximation import Approximation
from natgrad.lab.reproduce.bert import BertPhases
from natgrad.lab.reproduce.change_rates import ChangeRateItem
from natgrad.lab.reproduce.critical_batch import CriticalBatch
from natgrad.lab.reproduce.curves import Curves
from natgrad.lab.reproduce.eigen_inverse import EigenInverse
from natgrad.lab.reproduce.fractions import Fractions
from natgrad.lab.reproduce.full_batch import FullBatch
from natgrad.lab.reproduce.generalisation import Generalisation
from natgrad.lab.reproduce.intervals import IntervalItem
from natgrad.lab.reproduce.item import Finding, Item, Result
from natgrad.lab.reproduce.mask_rcnn import MaskRcnnHeads
from natgrad.lab.reproduce.monte_carlo import MonteCarlo
from natgrad.lab.reproduce.norm_structures import NormStructures
from natgrad.lab.reproduce.processes import Processes
from natgrad.lab.reproduce.runner import Measured, reproduce
from natgrad.lab.reproduce.scaling import Scaling
from natgrad.lab.reproduce.size_table import SizeTable
from natgrad.lab.reproduce.stages import StageProfile
from natgrad.lab.reproduce.training_schemes import Schemes
from natgrad.lab.reproduce.unet_membranes import UNetItem

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        SizeTable(),
        ChangeRateItem(),
        NormStructures(),
        EigenInverse(),
        Approximation(),
        CriticalBatch(),
        IntervalItem(),
        Curves(),
        Processes(),
        Schemes(),
        UNetItem(),
        Scaling(),
        MonteCarlo(),
        Fractions(),
        StageProfile(),
        Generalisation(),
        FullBatch(),
        BertPhases(),
        MaskRcnnHeads(),
    )
}

__all__ = ["ITEMS", "Finding", "Item", "Measured", "Result", "reproduce"]
