"""What data sets there are, where they lie in a folder, and where they come from.

Checksums are those of the files as their authors published them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remote:
    """A file below a mirror's address: its ``name`` there, where it goes to, and what it is."""

    name: str
    sha256: str
    size: int  # bytes
    to: str = ""  # another name here

    @property
    def local(self) -> str:
        return self.to or self.name


@dataclass(frozen=True)
class Source:
    """``files`` lie in the first of ``folders`` that has them, with one of ``endings``.

    What can be brought here is listed in ``remotes``, below any of ``mirrors``, and goes into
    ``folders[0]``; an archive is unpacked there.
    """

    name: str
    title: str
    about: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    endings: tuple[str, ...] = ("",)
    remotes: tuple[Remote, ...] = ()
    mirrors: tuple[str, ...] = ()
    archive: bool = False
    file_size: int = 0  # bytes of each file, where an archive is unpacked

    @property
    def size(self) -> int:
        return sum(remote.size for remote in self.remotes)


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

MNIST = Source(
    "mnist",
    "MNIST",
    "70,000 handwritten digits, 28 x 28",
    ("mnist", "MNIST/raw"),
    _IDX,
    ("", ".gz"),
    (
        Remote(
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            9_912_422,
        ),
        Remote(
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            28_881,
        ),
        Remote(
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            1_648_877,
        ),
        Remote(
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            4_542,
        ),
    ),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

FASHION_MNIST = Source(
    "fashion-mnist",
    "Fashion-MNIST",
    "70,000 pictures of clothes, 28 x 28",
    ("fashion-mnist", "FashionMNIST/raw"),
    _IDX,
    ("", ".gz"),
    (
        Remote(
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        Remote(
            "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29_515,
        ),
        Remote(
            "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4_422_102,
        ),
        Remote(
            "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5_148,
        ),
    ),
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
)

CIFAR10 = Source(
    "cifar10",
    "CIFAR-10",
    "60,000 photographs of 10 kinds, 32 x 32, the binary version",
    ("cifar-10-batches-bin",),
    (*(f"data_batch_{part}.bin" for part in range(1, 6)), "test_batch.bin"),
    remotes=(
        Remote(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    archive=True,
    file_size=30_730_000,
)

TINYSHAKESPEARE = Source(
    "tinyshakespeare",
    "tinyshakespeare",
    "1,115,394 characters of Shakespeare",
    ("text",),
    ("tinyshakespeare.txt",),
    remotes=(
        Remote(
            "input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            1_115_394,
            to="tinyshakespeare.txt",
        ),
    ),
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)

WIKITEXT2 = Source(
    "wikitext-2",
    "WikiText-2",
    "2,051,910 words of Wikipedia to learn from",
    ("text/wikitext-2", "wikitext-2"),
    ("train.txt", "valid.txt", "test.txt"),
    ("", ".gz"),
)

MEMBRANE = Source(
    "membrane",
    "The membrane set",
    "30 electron-microscopy images with masks, 512 x 512 (ISBI 2012)",
    ("membrane",),
    ("image", "label"),
)

ALL = (MNIST, FASHION_MNIST, CIFAR10, TINYSHAKESPEARE, WIKITEXT2, MEMBRANE)
