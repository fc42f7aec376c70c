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
}
