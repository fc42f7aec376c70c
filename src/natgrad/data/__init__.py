"""Data sets of the papers, found where they lie, and batches of them for every rank."""

from natgrad.data.characters import Characters, characters
from natgrad.data.cifar10 import cifar10
from natgrad.data.coco import Instances, coco_instances
from natgrad.data.crops import Squeeze, Zoom
from natgrad.data.digits import digits
from natgrad.data.fashion_mnist import fashion_mnist
from natgrad.data.get import get
from natgrad.data.image_folder import ImageFolder, image_folder, mean_image
from natgrad.data.images import Images, Normalise, Shift
from natgrad.data.loading import Loader, loader
from natgrad.data.masked_words import MaskedWords, masked_words
from natgrad.data.mnist import mnist
from natgrad.data.rows import Part, Rows, Split
from natgrad.data.sampling import Sampling
from natgrad.data.segmentation import Segmentation, membrane, segmentation_folder
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
    "Normalise",
    "Part",
    "Rows",
    "Sampling",
    "Segmentation",
    "Shift",
    "Split",
    "Squeeze",
    "WordPiece",
    "Zoom",
    "build_vocabulary",
    "characters",
    "cifar10",
    "coco_instances",
    "digits",
    "fashion_mnist",
    "get",
    "image_folder",
    "loader",
    "masked_words",
    "mean_image",
    "membrane",
    "mnist",
    "segmentation_folder",
    "tinyshakespeare",
    "wikitext2",
]
