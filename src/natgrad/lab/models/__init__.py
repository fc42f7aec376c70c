"""Networks: those of the papers, and small ones for small images. BERT is that of transformers,
Mask R-CNN that of torchvision."""

from natgrad.lab.models.alexnet import alexnet
from natgrad.lab.models.bert import BERT_BASE, BERT_LARGE, Bert, BertSize, bert
from natgrad.lab.models.convnet import convnet
from natgrad.lab.models.gpt import GPT
from natgrad.lab.models.initial import he_normal_
from natgrad.lab.models.mask_rcnn import MASK_RCNN_HEADS, mask_rcnn, small_mask_rcnn
from natgrad.lab.models.mlp import autoencoder, mlp
from natgrad.lab.models.resnet import Residual, resnet, small_resnet
from natgrad.lab.models.transformer import Transformer
from natgrad.lab.models.unet import UNet

__all__ = [
    "BERT_BASE",
    "BERT_LARGE",
    "GPT",
    "MASK_RCNN_HEADS",
    "Bert",
    "BertSize",
    "Residual",
    "Transformer",
    "UNet",
    "alexnet",
    "autoencoder",
    "bert",
    "convnet",
    "he_normal_",
    "mask_rcnn",
    "mlp",
    "resnet",
    "small_mask_rcnn",
    "small_resnet",
]
