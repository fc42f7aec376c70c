"""What "steepest" means in coordinates that are whitened by the curvature: one file each."""

from natgrad.geometry.base import Geometry
from natgrad.geometry.elementwise import Elementwise
from natgrad.geometry.euclidean import Euclidean
from natgrad.geometry.spectral import Spectral

__all__ = ["Elementwise", "Euclidean", "Geometry", "Spectral"]
