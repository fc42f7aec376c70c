"""Data sets of the papers, found where they lie, and batches of them for every rank."""

from natgrad.data.average_precision import (
    Matches,
    Precision,
    average_precision,
    box_matches,
    mask_matches,
)
from natgrad.data.characters import Characters, characters
from natgrad.data.cifar10 import cifar10
from natgrad.data.coco import Instances, coco_instances
from natgrad.data.coco_folder import coco_folder
from natgrad.data.crops import Squeeze, Zoom
from natgrad.data.digits import digits
from natgrad.data.fashion_mnist import fashion_mnist
from natgrad.data.get import get
from natgrad.data.image_folder import ImageFolder, image_folder
from natgrad.data.images import Images, Normalise, Shift
from natgrad.data.loading import Loader, loader
from natgrad.data.masked_words import MaskedWords, masked_words
from natgrad.data.means import mean_image
from natgrad.data.mnist import mnist
from natgrad.data.rows import Part, Rows, Split
from natgrad.data.sampling import Sampling
from natgrad.data.segmentation import Segmentation, membrane, segmentation_folder
from natgrad.data.shapes import draw_shapes
from natgrad.data.text import tinyshakespeare, wikitext2
from natgrad.data.vocabulary import build_vocabulary
from natgrad.data.wordpiece import WordPiece

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
