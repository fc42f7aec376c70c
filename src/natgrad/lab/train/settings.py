"""Everything that a run is told, as one frozen object: the same settings give the same run."""

from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from natgrad.checks import FRACTION, NOT_NEGATIVE, POSITIVE, Range, check_whole, number
from natgrad.errors import SettingError
from natgrad.lab.names import (
    CURVATURES,
    DAMPINGS,
    DATA,
    GEOMETRIES,
    INTERVALS,
    INVERSES,
    LENGTHS,
    NETWORKS,
    OPTIMIZERS,
    PLACEMENTS,
    PRECISION_METRICS,
    SECOND_PASSES,
    STRUCTURES,
    SUBSAMPLES,
    TASK_LOSSES,
)
from natgrad.lab.registry import Makers, Registry
from natgrad.lab.schemes import settings_by_name
from natgrad.lab.train.contradictions import contradictions
from natgrad.structures import MAX_DIM

CROPS = ("squeeze", "zoom")
SCHEDULES = ("constant", "polynomial", "steps", "cosine")
PRECISIONS = ("float32", "bfloat16", "float64")
METRICS = ("loss", "accuracy", "dice", "perplexity", *PRECISION_METRICS)

_ANY, _SHARE = NOT_NEGATIVE, FRACTION
_PROBABILITY = Range(low=0, high=1)


Allowed = tuple[str, ...] | Registry[Any] | Range
Spec = int | float | str  # a number, or a word that may have arguments
T = TypeVar("T")
_DTYPES = ("", *settings_by_name.PRECISIONS)
_WIRES = ("", *settings_by_name.WIRES)


def _of(
    section: str, default: Any, help: str, allowed: Allowed = (), numbers: Range | None = None
) -> Any:
    """``allowed`` are words, names of a registry, or a range of numbers; ``numbers`` those that may
    stand in place of a name."""
    words = () if isinstance(allowed, Range) else allowed
    numbers = allowed if isinstance(allowed, Range) else numbers
    about = {"section": section, "help": help, "words": words, "numbers": numbers}
    return field(default=default, metadata=about)


_task, _time = partial(_of, "task"), partial(_of, "training")
_optimizer, _kfac, _output = (partial(_of, name) for name in ("optimizer", "kfac", "output"))


def _with_help(owner: type[T]) -> type[T]:
    """The help of every field in the docstring, where a reader of Python looks for it."""
    entries = (f"        {one.name}: {one.metadata['help']}\n" for one in fields(owner))  # type: ignore[arg-type]
    owner.__doc__ = f"{owner.__doc__}\n\n    Arguments:\n{''.join(entries)}    "
    return owner


@_with_help
@dataclass(frozen=True)
class Settings:
    """One run. Intervals are in steps, begins and ends in epochs; 0 turns off what can be off."""

    data: str = _task("digits", "What to learn from.", DATA)
    folder: str = _task("", "Where the data are, if not at their usual place.")
    context: int = _task(128, "Tokens of a text sample.", Range(2))
    vocabulary: int = _task(0, "Pieces of the vocabulary of wikitext2; 0 is 8,192.", _ANY)
    train_samples: int = _task(0, "Training samples that are used; 0 is all.", _ANY)
    test_samples: int = _task(0, "Test samples that are used; 0 is all.", _ANY)
    image: int = _task(
        0, "Pixels of an image's side, where the data allow several; 0 is as usual.", _ANY
    )
    crop: str = _task(
        "squeeze", "What is cut out of imagenet's images (Osawa 2019, sec. 4.1).", CROPS
    )
    mean_image: bool = _task(
        False, "Subtract imagenet's mean image, not its mean colour (Osawa 2019, sec. 4.1)."
    )
    augment: bool = _task(False, "Random crops and mirroring, where the data have them.")
    network: str = _task("convnet", "What learns.", NETWORKS)
    width: int = _task(0, "Channels or units of the first layer; 0 is the network's own.", _ANY)
    layers: int = _task(0, "Layers of a GPT or BERT; 0 is as usual.", _ANY)
    heads: int = _task(0, "Heads of their attention; 0 is as usual.", _ANY)
    dropout: float = _task(0.0, "Share of units of a GPT or BERT that are left out.", _SHARE)
    he_normal: bool = _task(False, "Start from HeNormal weights (Osawa 2019, sec. 5).")
    start_from: str = _task("", "Start from weights of a run, by its folder, or of a file.")
    loss: str = _task("cross-entropy", "What is minimised.", TASK_LOSSES)
    label_smoothing: float = _task(0.0, "Share of a target that all classes get.", _SHARE)
    mixup: float = _task(0.0, "Alpha of running mixup (Osawa 2019, eq. 9).", _ANY)
    erasing: float = _task(
        0.0, "Probability of random erasing (Osawa 2019, sec. 4.1).", _PROBABILITY
    )

    batch_size: int = _time(256, "Samples of a step, of all processes together.", POSITIVE)
    micro_batch: int = _time(0, "Samples that a process takes at once; 0 is all.", _ANY)
    epochs: float = _time(0.0, "How long, in epochs.", _ANY)
    steps: int = _time(0, "Or in steps.", _ANY)
    precision: str = _time("float32", "Of the forward and backward pass.", PRECISIONS)
    seed: int = _time(0, "Of weights, order and all that is random.", _ANY)
    target: float = _time(
        0.0, "Stop at this metric on test data (Pauloski 2022, sec. 6.4.2); 0 is never.", _ANY
    )
    metric: str = _time("accuracy", "Metric of the target.", METRICS)

    optimizer: str = _optimizer("sgd", "What takes the steps.", OPTIMIZERS)
    lr: float = _optimizer(0.1, "Learning rate, at its highest.", POSITIVE)
    momentum: float = _optimizer(
        0.9, "Momentum; also the first beta of adam and its kin, lamb and soap.", _SHARE
    )
    displacement: bool = _optimizer(
        False, "Momentum of the weights themselves (Osawa 2019, eq. 17)."
    )
    coupled: bool = _optimizer(
        False, "Momentum in a fixed ratio to the learning rate (Osawa 2019, eq. 16)."
    )
    rescaling: bool = _optimizer(
        False, "Weights before norm layers keep their norm (Osawa 2019, eq. 18)."
    )
    second_pass: str = _optimizer(
        "", "Gradients a little uphill (Foret et al. 2021), or of a penalty on them.", SECOND_PASSES
    )
    weight_decay: float = _optimizer(0.0, "Pull of the weights towards 0.", _ANY)
    schedule: str = _optimizer("constant", "How the learning rate falls.", SCHEDULES)
    warmup: float = _optimizer(0.0, "Epochs during which it rises linearly.", _ANY)
    warmup_share: float = _optimizer(0.0, "Or the share of the run during which it does.", _SHARE)
    decay_begin: float = _optimizer(0.0, "Epoch at which polynomial or cosine begin to fall.", _ANY)
    decay_end: float = _optimizer(0.0, "Epoch at which they reach 0; the end if 0.", _ANY)
    decay_power: float = _optimizer(1.0, "Power of schedule polynomial.", POSITIVE)
    decay_at: tuple[float, ...] = _optimizer((), "Epochs at which schedule steps falls.")
    decay_factor: float = _optimizer(0.1, "Factor by which it then falls.", POSITIVE)

    kfac: bool = _kfac(True, "Precondition the gradients.")
    damping: int | float | str = _kfac(
        0.01, "Added to the eigenvalues of the curvature: a number, or", DAMPINGS, POSITIVE
    )
    damping_target: float = _kfac(
        0.0, "Damping it falls towards (Osawa 2019, eq. 14); 0 if it stays.", _ANY
    )
    damping_steps: int = _kfac(0, "Steps that set how fast it falls.", _ANY)
    norm_damping: float = _kfac(1.0, "Times the damping, for norm layers.", POSITIVE)
    factor_decay: float = _kfac(0.95, "Weight of the past in running averages.", _SHARE)
    kl_clip: float = _kfac(0.01, "KL clip, a bound on a step; 0 is none.", _ANY)
    update_every: int | float | str = _kfac(
        10, "Steps between updates: a number, or", INTERVALS, POSITIVE
    )
    refresh_every: int | float | str = _kfac(
        100, "Steps between decompositions: a number, or", INTERVALS, POSITIVE
    )
    ramp: bool = _kfac(True, "Both at steps 0, 1, 2, 4, 8, … until they are that far apart.")
    fisher: str = _kfac("empirical", "Which gradients are averaged.", CURVATURES)
    statistics: int | float | str = _kfac(
        0, "Share of the samples, or their number, that factors see; 0 is all.", SUBSAMPLES, _ANY
    )
    structure: str = _kfac(
        "", "What is kept of a layer's block; if nothing is said, Kronecker factors.", STRUCTURES
    )
    norm_structure: str = _kfac("unitwise", "And of a norm layer's.", STRUCTURES)
    max_dim: int = _kfac(MAX_DIM, "Widest factor that is kept whole; 0 is any.", _ANY)
    factor_dtype: str = _kfac("", "In which factors are kept; as usual if empty.", _DTYPES)
    wire_dtype: str = _kfac("", "In which they travel; as usual if empty.", _WIRES)
    geometry: str = _kfac("euclidean", "What is steepest.", GEOMETRIES)
    length: str = _kfac("", "Of a layer's step; that of the KL clip if empty.", LENGTHS)
    inverse: str = _kfac("eigen", "How factors are inverted.", INVERSES)
    placement: str = _kfac("auto", "Which process does what.", PLACEMENTS)
    fraction: float = _kfac(
        0.5,
        "Share of the processes that precondition a layer, with placement hybrid.",
        Range(0, 1, open_low=True),
    )
    include: tuple[str, ...] = _kfac((), "Patterns of modules that K-FAC covers; all if none.")
    exclude: tuple[str, ...] = _kfac((), "Patterns of modules that it leaves out.")

    evaluate_every: int = _output(0, "Steps between evaluations; 0 is an epoch.", _ANY)
    fit_samples: int = _output(0, "Training samples that are tested as well; 0 is none.", _ANY)
    checkpoint_every: int = _output(0, "Steps between checkpoints; 0 is an epoch.", _ANY)
    keep: int = _output(2, "Checkpoints that stay.", POSITIVE)
    log_every: int = _output(10, "Steps between lines of the log.", POSITIVE)
    workers: int = _output(0, "Processes that read ahead.", _ANY)

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, _checked(one, getattr(self, one.name)))
        for wrong in contradictions(self):
            raise SettingError(wrong)


def kind(one: Field[Any]) -> type:
    """``str``, ``int``, ``float``, ``bool``, or what a tuple is of; text of what may be a word."""
    hint = _HINTS[one.name]
    if hint == Spec:
        return str
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    assert isinstance(hint, type)
    return hint


def several(one: Field[Any]) -> bool:
    """Whether it is a tuple."""
    return get_origin(_HINTS[one.name]) is tuple


def _checked(one: Field[Any], value: Any) -> Any:
    """As the field's type, or an error."""
    wanted, words = kind(one), one.metadata["words"]
    if isinstance(words, Makers):
        return _word(one, words, value)
    if several(one):
        if not isinstance(value, tuple | list):
            raise SettingError(
                f"{one.name} is {value!r} but must be a list of {_NAMES[wanted]}: write one."
            )
        return tuple(_typed(one.name, item, wanted) for item in value)
    value = _typed(one.name, value, wanted)
    if isinstance(words, Registry):
        words.check(value)
    elif words:
        if value not in words:
            raise SettingError(
                f"{one.name} is {value!r} but must be one of {', '.join(words)}: name one of them."
            )
    elif (allowed := one.metadata["numbers"]) is not None:
        number(value, one.name, allowed)
    return value


def _word(one: Field[Any], words: Makers[Any], value: Any) -> Any:
    """A number where one may stand there, and otherwise what a word of these is kept as."""
    if value == "" == one.default:
        return value
    found = words.normal(value, one.name)
    if isinstance(found, str):
        return found
    allowed = one.metadata["numbers"]
    if allowed is None:
        raise SettingError(f"{one.name} is {value!r} but must be text: name {words.choices()}.")
    if one.metadata["words"] is INTERVALS:
        check_whole(found, one.name, low=1)
        return found
    number(found, one.name, allowed)
    return found if words is SUBSAMPLES else float(found)


def _typed(name: str, value: Any, wanted: type) -> Any:
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise SettingError(f"{name} is {value!r} but must be {_NAMES[wanted]}: write one.")
    if wanted is float:
        number(value, name, Range())
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


# Those that may change when a run goes on.
FREE = frozenset(
    [
        "folder",
        "micro_batch",
        "epochs",
        "steps",
        "target",
        "metric",
        "placement",
        "fraction",
        "evaluate_every",
        "fit_samples",
        "checkpoint_every",
        "keep",
        "log_every",
        "workers",
    ]
)


def words_text(one: Field[Any]) -> str:
    """What may stand there, for help and files; nothing where it is no name."""
    words = one.metadata["words"]
    return words.help() if isinstance(words, Registry) else ", ".join(filter(None, words))


_HINTS = get_type_hints(Settings)
