"""How a module becomes one matrix."""

from natgrad.layers import attention, conv, embedding, linear, norm, recurrent
from natgrad.layers.base import Elementwise, Layer, SharedInput
from natgrad.layers.registry import NotCovered, layers_of, register, registered

__all__ = [
    "Elementwise",
    "Layer",
    "NotCovered",
    "SharedInput",
    "attention",
    "conv",
    "embedding",
    "layers_of",
    "linear",
    "norm",
    "recurrent",
    "register",
    "registered",
]
