"""Everything that a run is told, as one frozen object: the same settings give the same run."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from natgrad.errors import SettingError
from natgrad.runtime.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range, number

_TEXTS = ("shakespeare", "wikitext2")
DATA = ("digits", "mnist", "fashion-mnist", "cifar10", "imagenet", "membrane", "coco", *_TEXTS)
CROPS = ("squeeze", "zoom")
LOSSES = ("cross-entropy", "reconstruction", "pixels", "tokens", "masked-tokens", "instances")
OPTIMIZERS = ("sgd", "adamw", "lars", "lamb", "muon", "soap", "shampoo")
SCHEDULES = ("constant", "polynomial", "steps", "cosine")
PRECISIONS = ("float32", "bfloat16", "float64")
FISHERS = ("empirical", "monte-carlo", "exact")
INVERSES = ("eigen", "cholesky")
PLACEMENTS = ("auto", "comm", "mem", "hybrid", "scatter", "local")
_PRECISION = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")
METRICS = ("loss", "accuracy", "dice", "perplexity", *_PRECISION)
_RESNETS = tuple(f"resnet{depth}" for depth in (8, 20, 32, 56, 110, 18, 34, 50, 101, 152))
MASK_RCNNS = ("mask-rcnn", "mask-rcnn-small")
NETWORKS = ("convnet", "mlp", "autoencoder", "unet", "gpt", "bert", *_RESNETS, *MASK_RCNNS)

_ANY, _SHARE = NOT_NEGATIVE, FRACTION
_PROBABILITY = Range(low=0, high=1)


def _of(section: str, default: Any, help: str, allowed: tuple[str, ...] | Range = ()) -> Any:
    """``allowed`` are words or a range of numbers."""
    words = allowed if isinstance(allowed, tuple) else ()
    numbers = allowed if isinstance(allowed, Range) else None
    about = {"section": section, "help": help, "words": words, "numbers": numbers}
    return field(default=default, metadata=about)


_task, _time = partial(_of, "task"), partial(_of, "training")
_optimizer, _kfac, _output = (partial(_of, name) for name in ("optimizer", "kfac", "output"))


@dataclass(frozen=True)
class Settings:
    """One run. Intervals are in steps, begins and ends in epochs; 0 turns off what can be off."""

    data: str = _task("digits", "What to learn from.", DATA)
    folder: str = _task("", "Where the data are, if not at their usual place.")
    context: int = _task(128, "Tokens of a text sample.", Range(2))
    train_samples: int = _task(0, "Training samples that are used; 0 is all.", _ANY)
    test_samples: int = _task(0, "Test samples that are used; 0 is all.", _ANY)
    image: int = _task(0, "Pixels of an image's side, where the data allow several.", _ANY)
    crop: str = _task("squeeze", "What is cut out of imagenet's images (O11, P20).", CROPS)
    mean_image: bool = _task(False, "Subtract imagenet's mean image, not its mean colour (O11).")
    augment: bool = _task(False, "Random crops and mirroring, where the data have them.")
    network: str = _task("convnet", "What learns.", NETWORKS)
    width: int = _task(0, "Of the network: channels or units of its first layer.", _ANY)
    layers: int = _task(0, "Of a transformer.", _ANY)
    heads: int = _task(0, "Of a transformer.", _ANY)
    dropout: float = _task(0.0, "Share of units that are left out.", _SHARE)
    he_normal: bool = _task(False, "Start from HeNormal weights (O22).")
    start_from: str = _task("", "Or from those of a run, by its folder, or of a file.")
    loss: str = _task("cross-entropy", "What falls.", LOSSES)
    label_smoothing: float = _task(0.0, "Share of a target that all classes get.", _SHARE)
    mixup: float = _task(0.0, "Alpha of running mixup (O12).", _ANY)
    erasing: float = _task(0.0, "Probability of random erasing (O13).", _PROBABILITY)

    batch_size: int = _time(256, "Samples of a step, of all processes together.", POSITIVE)
    micro_batch: int = _time(0, "Samples that a process takes at once; 0 is all.", _ANY)
    epochs: float = _time(0.0, "How long, in epochs.", _ANY)
    steps: int = _time(0, "Or in steps.", _ANY)
    precision: str = _time("float32", "Of the forward and backward pass.", PRECISIONS)
    seed: int = _time(0, "Of weights, order and all that is random.", _ANY)
    target: float = _time(0.0, "Stop when the metric is as good on test data (P28).", _ANY)
    metric: str = _time("accuracy", "That of the target.", METRICS)

    optimizer: str = _optimizer("sgd", "What takes the steps.", OPTIMIZERS)
    lr: float = _optimizer(0.1, "Learning rate, at its highest.", POSITIVE)
    momentum: float = _optimizer(0.9, "Also the first beta of adamw, lamb and soap.", _SHARE)
    displacement: bool = _optimizer(False, "Momentum of the weights themselves (O20).")
    coupled: bool = _optimizer(False, "Momentum in a fixed ratio to the learning rate (O19).")
    rescaling: bool = _optimizer(False, "Weights before norm layers keep their norm (O21).")
    weight_decay: float = _optimizer(0.0, "Pull of the weights towards 0.", _ANY)
    schedule: str = _optimizer("constant", "Of the learning rate.", SCHEDULES)
    warmup: float = _optimizer(0.0, "Epochs during which it rises linearly.", _ANY)
    warmup_share: float = _optimizer(0.0, "Or the share of the run during which it does.", _SHARE)
    decay_begin: float = _optimizer(0.0, "Epoch at which polynomial or cosine begin to fall.", _ANY)
    decay_end: float = _optimizer(0.0, "Epoch at which they reach 0; the end if 0.", _ANY)
    decay_power: float = _optimizer(1.0, "Of polynomial.", POSITIVE)
    decay_at: tuple[float, ...] = _optimizer((), "Epochs at which steps fall.")
    decay_factor: float = _optimizer(0.1, "By which steps fall.", POSITIVE)

    kfac: bool = _kfac(True, "Precondition the gradients.")
    damping: float = _kfac(0.01, "Added to the curvature.", POSITIVE)
    damping_target: float = _kfac(0.0, "Where it falls to (O16), if it does.", _ANY)
    damping_steps: int = _kfac(0, "In about as many steps.", _ANY)
    norm_damping: float = _kfac(1.0, "Times the damping, for norm layers.", POSITIVE)
    decay: float = _kfac(0.95, "Weight of the past in running averages.", _SHARE)
    kl_clip: float = _kfac(1e-3, "Bound on a step; 0 is none.", _ANY)
    update_every: int = _kfac(10, "Steps between updates of factors.", POSITIVE)
    refresh_every: int = _kfac(100, "Steps between decompositions.", POSITIVE)
    ramp: bool = _kfac(True, "Both at steps 0, 1, 2, 4, 8, … before that.")
    fisher: str = _kfac("empirical", "Which gradients are averaged.", FISHERS)
    inverse: str = _kfac("eigen", "How factors are inverted.", INVERSES)
    placement: str = _kfac("auto", "Which process does what.", PLACEMENTS)
    fraction: float = _kfac(
        0.5, "Of the processes, with placement hybrid.", Range(0, 1, open_low=True)
    )
    include: tuple[str, ...] = _kfac((), "Patterns of modules; all if none.")
    exclude: tuple[str, ...] = _kfac((), "Patterns of modules.")

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
    if words := one.metadata["words"]:
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
    if s.network == "autoencoder" and 0 < s.width < 4:
        yield (
            f"width is {s.width} but the third layer of an autoencoder has a fourth of it: pass at "
            "least 4."
        )
    if s.seed >= 2**63:
        yield f"seed is {s.seed} but must be below 2**63: pass a smaller one."
    if s.target and s.metric not in METRICS_OF[s.loss]:
        yield (
            f"metric is {s.metric} but loss {s.loss} has {', '.join(METRICS_OF[s.loss])}: name one "
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
METRICS_OF = {
    "cross-entropy": ("loss", "accuracy"),
    "reconstruction": ("loss",),
    "pixels": ("loss", "accuracy", "dice"),
    "tokens": ("loss", "accuracy", "perplexity"),
    "masked-tokens": ("loss", "accuracy", "perplexity"),
    "instances": ("loss", *_PRECISION),
}
_HINTS = get_type_hints(Settings)
