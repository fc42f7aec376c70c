"""Networks: those of the papers, and small ones for small images. BERT is that of transformers,
Mask R-CNN that of torchvision."""

from natgrad.models.bert import BERT_BASE, BERT_LARGE, Bert, BertSize, bert
from natgrad.models.convnet import convnet
from natgrad.models.gpt import GPT
from natgrad.models.initial import he_normal_
from natgrad.models.mask_rcnn import MASK_RCNN_HEADS, mask_rcnn, small_mask_rcnn
from natgrad.models.mlp import autoencoder, mlp
from natgrad.models.resnet import Residual, resnet, small_resnet
from natgrad.models.transformer import Transformer
from natgrad.models.unet import UNet

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
