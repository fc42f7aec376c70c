"""How a module becomes one matrix ``W [rows, cols]`` with inputs ``a`` and output gradients ``g``.

A layer brings what a module's forward and backward pass show into the shapes ``a [n, s, cols]`` and
``g [n, s, rows]``, for samples ``n`` and shared positions ``s``. All else (structures, inverses,
placement) then works for every kind of module. ``@register`` adds one.
"""

from natgrad.layers import (
    attention,
    behaviour,
    bilinear,
    conv,
    embedding,
    linear,
    norm,
    recurrent,
)
from natgrad.layers.base import Layer, SharedInput
from natgrad.layers.elementwise import Elementwise
from natgrad.layers.experts import Expert, Experts
from natgrad.layers.registry import NotCovered, layers_of, register, registered
from natgrad.layers.row_parts import Interleaved

__all__ = [
    "Elementwise",
    "Expert",
    "Experts",
    "Interleaved",
    "Layer",
    "NotCovered",
    "SharedInput",
    "attention",
    "behaviour",
    "bilinear",
    "conv",
    "embedding",
    "layers_of",
    "linear",
    "norm",
    "recurrent",
    "register",
    "registered",
]
