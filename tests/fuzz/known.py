"""Cases that have failed once, as hypothesis printed them: they are done again in every run."""

from fuzz.networks import Network
from fuzz.one_process import Batch, Settings
from natgrad import Diagonal, UnitWise

ONE_PROCESS = {
    # The second recomputation of a reentrant checkpoint was not counted, without a word.
    "two backward passes over a reentrant checkpoint": (
        Network(("vector", 3), (("norm", 0, ""),), "mean", checkpointed=True),
        Settings(UnitWise()),
        [Batch((2,), retained=True)],
    ),
    # It told to call observe(), which nobody has to.
    "vectors of a Fisher and a reentrant checkpoint": (
        Network(("image", 2, 3, 6), (("norm", 1, ""),), None, checkpointed=True),
        Settings(Diagonal(), exact=True),
        [Batch((1, 1), evaluated=2)],
    ),
    # An evaluation of parts is no first call of a reentrant checkpoint.
    "evaluated parts and a checkpoint": (
        Network(("image", 2, 7), (("norm", 5, "twice"),) * 3, None, checkpointed=False),
        Settings(UnitWise(), exact=True, parts=True),
        [Batch((2,), evaluated=5, retried=True)],
    ),
    # A mean over no position at all.
    "nothing but padding": (
        Network(("words", 2, 4, 3, 0), (("linear", 1, False, "", ""),), "mean"),
        Settings(exact=True, clip=1e-3),
        [Batch((1,)), Batch((1,))],
    ),
    # Where the model itself is not called, nothing says that tokens are not samples; the user does.
    "a part with its tokens in front": (
        Network(("tokens", 2, 2), (("norm", 0, "tokens_first"),), None),
        Settings(parts=True, damping=0.01),
        [Batch((1,))],
    ),
    # The oracle took half of the head's curvature for that of a weight of which no entry was used.
    "a tied embedding and nothing but padding": (
        Network(("words", 1, 3, 1, 2), (("linear", 1, False, "", ""),), "mean", tied=True),
        Settings(damping=0.01),
        [Batch((1,))],
    ),
    # Rounding errors of a norm layer behind another one, which has nearly nothing to divide by.
    "two norm layers": (
        Network(
            ("image", 1, 2, 2, 2),
            (
                ("conv", 1, 1, (1, 1, 1), (1, 1, 3), (1, 1, 1), 1, "zeros", False, ""),
                ("norm", 0, ""),
                ("norm", 0, ""),
            ),
            "mean",
        ),
        Settings(damping=0.01),
        [Batch((1,), retained=True)],
    ),
    # Single precision leaves two digits of the gradient of the norm layer in front.
    "two numbers that are normalised twice": (
        Network(
            ("tokens", 1, 2),
            (("norm", 0, ""), ("attention", False, False, False, "twice"), ("norm", 1, "")),
            "mean",
        ),
        Settings(damping=0.01, single=True),
        [Batch((1,))],
    ),
}
