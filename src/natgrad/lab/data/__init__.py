"""Data sets of the papers, found where they lie, and batches of them for every rank."""

from natgrad.lab.data.average_precision import (
    Matches,
    Precision,
    average_precision,
    box_matches,
    mask_matches,
)
from natgrad.lab.data.characters import Characters, characters
from natgrad.lab.data.cifar10 import cifar10
from natgrad.lab.data.coco import Instances, coco_instances
from natgrad.lab.data.coco_folder import coco_folder
from natgrad.lab.data.crops import Squeeze, Zoom
from natgrad.lab.data.dataset import Part, Rows, Split
from natgrad.lab.data.digits import digits
from natgrad.lab.data.fashion_mnist import fashion_mnist
from natgrad.lab.data.get import get
from natgrad.lab.data.image_folder import ImageFolder, image_folder
from natgrad.lab.data.images import Images, Normalise, Shift
from natgrad.lab.data.loading import Loader, loader
from natgrad.lab.data.masked_words import MaskedWords, masked_words
from natgrad.lab.data.mean_image import mean_image
from natgrad.lab.data.mnist import mnist
from natgrad.lab.data.sampling import Sampling
from natgrad.lab.data.segmentation import Segmentation, membrane, segmentation_folder
from natgrad.lab.data.shapes import draw_shapes
from natgrad.lab.data.text import tinyshakespeare, wikitext2
from natgrad.lab.data.vocabulary import build_vocabulary
from natgrad.lab.data.wordpiece import WordPiece

__all__ = [
    "Characters",
    "ImageFolder",
    "Images",
    "Instances",
    "Loader",
    "MaskedWords",
    "Matches",
    "Normalise",
    "Part",
    "Precision",
    "Rows",
    "Sampling",
    "Segmentation",
    "Shift",
    "Split",
    "Squeeze",
    "WordPiece",
    "Zoom",
    "average_precision",
    "box_matches",
    "build_vocabulary",
    "characters",
    "cifar10",
    "coco_folder",
    "coco_instances",
    "digits",
    "draw_shapes",
    "fashion_mnist",
    "get",
    "image_folder",
    "loader",
    "mask_matches",
    "masked_words",
    "mean_image",
    "membrane",
    "mnist",
    "segmentation_folder",
    "tinyshakespeare",
    "wikitext2",
]
