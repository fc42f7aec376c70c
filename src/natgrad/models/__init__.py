"""Networks in plain torch: those of the papers, and small ones for small images."""

from natgrad.models.convnet import convnet
from natgrad.models.gpt import GPT
from natgrad.models.initial import he_normal_
from natgrad.models.mlp import autoencoder, mlp
from natgrad.models.resnet import Residual, resnet, small_resnet
from natgrad.models.transformer import Transformer
from natgrad.models.unet import UNet

__all__ = [
    "GPT",
    "Residual",
    "Transformer",
    "UNet",
    "autoencoder",
    "convnet",
    "he_normal_",
    "mlp",
    "resnet",
    "small_resnet",
]
