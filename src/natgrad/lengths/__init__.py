"""How long a step is, layer by layer: one file each."""

from natgrad.lengths.base import Length
from natgrad.lengths.graft import Graft
from natgrad.lengths.output_change import OutputChange
from natgrad.lengths.rms import Rms

__all__ = ["Graft", "Length", "OutputChange", "Rms"]
