"""Everything that a run is told, as one frozen object: the same settings give the same run."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from natgrad.checks import FRACTION, NOT_NEGATIVE, POSITIVE, Range, number
from natgrad.errors import SettingError
from natgrad.lab.names import (
    CURVATURES,
    DATA,
    INVERSES,
    NETWORKS,
    OPTIMIZERS,
    PLACEMENTS,
    PRECISION_METRICS,
    TASK_LOSSES,
    TaskLoss,
)
from natgrad.lab.registry import Registry, is_path

CROPS = ("squeeze", "zoom")
SCHEDULES = ("constant", "polynomial", "steps", "cosine")
PRECISIONS = ("float32", "bfloat16", "float64")
METRICS = ("loss", "accuracy", "dice", "perplexity", *PRECISION_METRICS)

_ANY, _SHARE = NOT_NEGATIVE, FRACTION
_PROBABILITY = Range(low=0, high=1)


Allowed = tuple[str, ...] | Registry[Any] | Range
T = TypeVar("T")


def _of(section: str, default: Any, help: str, allowed: Allowed = ()) -> Any:
    """``allowed`` are words, names of a registry, or a range of numbers."""
    words = () if isinstance(allowed, Range) else allowed
    numbers = allowed if isinstance(allowed, Range) else None
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
    damping: float = _kfac(0.01, "Added to the eigenvalues of the curvature.", POSITIVE)
    damping_target: float = _kfac(
        0.0, "Damping it falls towards (Osawa 2019, eq. 14); 0 if it stays.", _ANY
    )
    damping_steps: int = _kfac(0, "Steps that set how fast it falls.", _ANY)
    norm_damping: float = _kfac(1.0, "Times the damping, for norm layers.", POSITIVE)
    factor_decay: float = _kfac(0.95, "Weight of the past in running averages.", _SHARE)
    kl_clip: float = _kfac(1e-3, "KL clip, a bound on a step; 0 is none.", _ANY)
    update_every: int = _kfac(10, "Steps between updates of factors.", POSITIVE)
    refresh_every: int = _kfac(100, "Steps between decompositions.", POSITIVE)
    ramp: bool = _kfac(True, "Both at steps 0, 1, 2, 4, 8, … until they are that far apart.")
    fisher: str = _kfac("empirical", "Which gradients are averaged.", CURVATURES)
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
    """``str``, ``int``, ``float``, ``bool``, or what a tuple is of."""
    hint = _HINTS[one.name]
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    assert isinstance(hint, type)
    return hint


def several(one: Field[Any]) -> bool:
    """Whether it is a tuple."""
    return get_origin(_HINTS[one.name]) is tuple


def _checked(one: Field[Any], value: Any) -> Any:
    """As the field's type, or an error."""
    wanted = kind(one)
    if several(one):
        if not isinstance(value, tuple | list):
            raise SettingError(
                f"{one.name} is {value!r} but must be a list of {_NAMES[wanted]}: write one."
            )
        return tuple(_typed(one.name, item, wanted) for item in value)
    value = _typed(one.name, value, wanted)
    words = one.metadata["words"]
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


def _typed(name: str, value: Any, wanted: type) -> Any:
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise SettingError(f"{name} is {value!r} but must be {_NAMES[wanted]}: write one.")
    if wanted is float:
        number(value, name, Range())
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def contradictions(s: Settings) -> Iterator[str]:
    """Settings that do not go together, each in a sentence."""
    if bool(s.epochs) == bool(s.steps):
        given = "both are given" if s.steps else "neither is given"
        yield f"A run lasts for epochs or for steps but {given}: pass one of the two."
    if s.micro_batch > s.batch_size:
        yield (
            f"micro_batch is {s.micro_batch} but a step has only {s.batch_size} samples: pass a "
            "smaller one, or a larger batch_size."
        )
    if s.loss != "cross-entropy":
        for name in ("mixup", "label_smoothing"):
            if getattr(s, name):
                yield (
                    f"{name} mixes the targets of classes but the loss is {s.loss}: leave it out, "
                    "or pass loss cross-entropy."
                )
    if s.mean_image and s.crop != "squeeze":
        yield (
            f"mean_image is the mean of images that crop squeeze cuts but the crop is {s.crop}: "
            "leave one of the two out."
        )
    if s.loss == "instances":
        if s.fisher != "empirical":
            yield (
                f"fisher is {s.fisher} but loss instances has no output from which targets could "
                "be drawn: leave it out."
            )
        if s.rescaling:
            yield "rescaling is not for loss instances: leave it out."
    if is_path(s.loss) and s.fisher != "empirical":
        yield (
            f"fisher is {s.fisher} but nobody knows how targets of the loss {s.loss} are drawn: "
            "leave it out, or name another loss."
        )
    if s.schedule == "steps" and not s.decay_at:
        yield "schedule steps needs the epochs at which it falls: pass decay_at, such as 35,75,90."
    if s.decay_at and s.schedule != "steps":
        yield (
            f"decay_at belongs to schedule steps but the schedule is {s.schedule}: leave one of "
            "the two out."
        )
    if list(s.decay_at) != sorted(set(s.decay_at)) or any(e <= 0 for e in s.decay_at):
        yield f"decay_at is {list(s.decay_at)} but must be positive and rise: sort the epochs."
    if s.decay_end and s.decay_end <= s.decay_begin:
        yield (
            f"decay_end is {s.decay_end:g} but must be above decay_begin, {s.decay_begin:g}: pass "
            "the epoch at which the rate reaches 0."
        )
    if bool(s.damping_target) != bool(s.damping_steps):
        yield (
            "damping_target and damping_steps belong together but one of them is 0: pass both, or "
            "none for a damping that stays."
        )
    if s.optimizer == "naturalmuon" and s.kfac:
        yield (
            "optimizer naturalmuon preconditions gradients itself but kfac is on: turn kfac off, "
            "or pass another optimizer."
        )
    if (s.displacement or s.coupled) and s.optimizer != "sgd":
        yield (
            f"displacement and coupled belong to optimizer sgd but it is {s.optimizer}: leave them "
            "out, or pass optimizer sgd."
        )
    if s.warmup and s.warmup_share:
        yield "warmup and warmup_share both say how long the rate rises: leave one of the two out."
    if s.coupled and (s.warmup or s.warmup_share):
        yield (
            "coupled keeps the ratio of momentum and learning rate at the first step, where warmup "
            "makes the rate low, so that the momentum would rise above 1: leave one of the two out."
        )
    if s.start_from and s.he_normal:
        yield "start_from and he_normal both say which weights are first: leave one of the two out."
    if s.network.endswith("autoencoder") and 0 < s.width < 4:
        yield (
            f"width is {s.width} but the third layer of an autoencoder has a fourth of it: pass at "
            "least 4."
        )
    if s.seed >= 2**63:
        yield f"seed is {s.seed} but must be below 2**63: pass a smaller one."
    if s.target and s.metric not in metrics_of(s.loss):
        yield (
            f"metric is {s.metric} but loss {s.loss} has {', '.join(metrics_of(s.loss))}: name one "
            "of these."
        )


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


def metrics_of(loss: str) -> tuple[str, ...]:
    """Those that come with it; with a function of the user's there is the loss alone."""
    return TASK_LOSSES[loss].metrics if loss in TASK_LOSSES else TaskLoss().metrics


def words_text(one: Field[Any]) -> str:
    """What may stand there, for help and files; nothing where it is no name."""
    words = one.metadata["words"]
    return words.help() if isinstance(words, Registry) else ", ".join(words)


_HINTS = get_type_hints(Settings)
