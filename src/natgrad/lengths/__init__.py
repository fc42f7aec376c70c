"""How long a step is, layer by layer: one file each."""

from natgrad.lengths.base import Length
from natgrad.lengths.dogleg import Dogleg
from natgrad.lengths.graft import Graft
from natgrad.lengths.output_change import OutputChange
from natgrad.lengths.rms import Rms

__all__ = ["Dogleg", "Graft", "Length", "OutputChange", "Rms"]
