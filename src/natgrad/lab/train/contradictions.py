"""Settings that do not go together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from natgrad.lab.names import TASK_LOSSES, TaskLoss
from natgrad.lab.registry import is_path

if TYPE_CHECKING:
    from natgrad.lab.train.settings import Settings


def metrics_of(loss: str) -> tuple[str, ...]:
    """Those that come with it; with a function of the user's there is the loss alone."""
    return TASK_LOSSES[loss].metrics if loss in TASK_LOSSES else TaskLoss().metrics


def contradictions(s: "Settings") -> Iterator[str]:
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
    if s.damping_target and isinstance(s.damping, str):
        yield (
            f"damping is {s.damping} but damping_target makes it fall as well: leave one of the "
            "two out."
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
