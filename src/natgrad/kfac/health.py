"""Is it working? What the first refreshes have shown, as a table with advice, and one warning.

K-FAC fails silently: a damping far above the curvature makes it plain gradient descent, one far
below it trusts noise, a layer without statistics is left alone, and a refresh may cost more than
all the training between two. Each shows in numbers that are there anyway:

    cosine   <g', g> / |g'| |g|          of a block's gradient before and after; 1: not turned
    damped   damping <g', g> / <g, g>    mean of damping / (curvature + damping) along g

Both are two more inner products of what a step has in its hands, and only on the first steps with a
refresh, and on the next one after somebody has looked. On all others nothing is measured.
"""

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Protocol

from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import BY_THE_USER, Uncovered, clean
from natgrad.capture.stopwatch import Stopwatch
from natgrad.curvature.fisher import Fisher
from natgrad.damping import Relative
from natgrad.geometry import Euclidean
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.settings import KFACSettings
from natgrad.layers.bare import Bare
from natgrad.layers.experts import Expert
from natgrad.tables import Column, Table, seconds_text

SPEAKS_AT, AT_LATEST = 50, 100  # steps after which it warns, with three refreshes or without
_REFRESHES = 3
_LEAST_COVERED = 0.9
_SAME_DIRECTION = 0.995
_ALL_DAMPED, _UNDAMPED = 0.98, 1e-4
_STEPS_OF_A_REFRESH = 10
_SHORT = 1.0  # seconds that nobody minds


@dataclass(frozen=True)
class Health(Table):
    """``problems``: a sentence each, with what to do; none if all is well. By block, of those that
    this rank preconditions: ``cosines`` of plain and preconditioned gradient, and the share of the
    damping in what the gradient was divided by, ``damped``."""

    problems: tuple[str, ...] = ()
    cosines: dict[str, float] = field(default_factory=dict)
    damped: dict[str, float] = field(default_factory=dict)


class Looked(Protocol):
    """The attributes of a preconditioner that are looked at."""

    model: nn.Module
    blocks: list[Block]
    uncovered: dict[str, Uncovered]
    curvature: Fisher
    settings: KFACSettings
    finding: LossFinding
    preconditioning: Preconditioning
    watch: Stopwatch
    steps: int
    monitor: "Monitor"


class Monitor:
    """Watches the first steps. ``open``: until it has spoken, or had nothing to say."""

    def __init__(self) -> None:
        self.open = True
        self.steps_without: list[float] = []  # seconds of training steps without K-FAC
        self.first_refresh = 0.0
        self._ended = self._spent = 0.0

    def after_step(self, kfac: Looked) -> list[str]:
        """Returns one warning, once."""
        now, spent = perf_counter(), sum(kfac.watch.seconds.values())
        if self._ended:
            self.steps_without.append(now - self._ended - (spent - self._spent))
        self._ended, self._spent = now, spent
        self.first_refresh = self.first_refresh or kfac.watch.seconds.get("refresh", 0.0)
        if kfac.steps < SPEAKS_AT:
            return []
        if kfac.preconditioning.refreshes < _REFRESHES and kfac.steps < AT_LATEST:
            return []
        self.open = False
        problems = report(kfac).problems
        if not problems:
            return []
        listed = " ".join(f"({i}) {problem}" for i, problem in enumerate(problems, 1))
        return [
            f"After {kfac.steps} steps K-FAC may not work as it should: {listed} kfac.health() "
            "shows it as a table; docs/troubleshooting.md goes by symptom."
        ]


def health(kfac: Looked) -> Health:
    """What is known now; the next step with a refresh is looked at again."""
    kfac.preconditioning.looks_left = max(1, kfac.preconditioning.looks_left)
    return report(kfac)


def report(kfac: Looked) -> Health:
    cosines, damped = _directions(kfac)
    size = {block.name: sum(p.numel() for p in block.parameters) for block in kfac.blocks}
    rows = [
        _coverage(kfac),
        _statistics(kfac),
        _loss(kfac),
        _curvature(kfac, damped, size),
        _direction(kfac, cosines, size),
        _cost(kfac),
        _numbers(kfac),
    ]
    problems = tuple(f"{found}: {advice}" for _, found, verdict, advice in rows if verdict != "ok")
    columns = tuple(map(Column, ("look at", "found", "verdict", "what to do")))
    footer = f"after {kfac.steps} steps: {len(problems)} of {len(rows)} need a look"
    return Health(
        "Health",
        columns,
        tuple(rows),
        footer,
        problems=problems,
        cosines=cosines,
        damped=damped,
    )


Row = tuple[str, str, str, str]


def _directions(kfac: Looked) -> tuple[dict[str, float], dict[str, float]]:
    motion = kfac.preconditioning.motion
    inverts = isinstance(motion.geometry, Euclidean) and motion.geometry.power == 1
    cosines, damped = {}, {}
    for stack in kfac.preconditioning.stacks:
        if stack.looked is None:
            continue
        products, damping = stack.looked
        for block, (dot, raw, out) in zip(stack.blocks, products.T.tolist(), strict=True):
            if raw > 0 and out > 0:
                cosines[block.name] = dot / (raw * out) ** 0.5
                if inverts and motion.is_free and not isinstance(damping, Relative):
                    damped[block.name] = damping * dot / raw
    return cosines, damped


def _coverage(kfac: Looked) -> Row:
    covered = left = 0
    kinds: dict[str, int] = {}
    blocks = {id(p): block for block in kfac.blocks for p in block.parameters}
    for raw, p in kfac.model.named_parameters():
        why = kfac.uncovered.get(clean(raw))
        chosen = why is not None and why.reason in BY_THE_USER
        if not p.requires_grad or chosen:
            continue
        block = blocks.get(id(p))
        if block is not None and not block.lost and (block.ready or not block.refused):
            covered += p.numel()
        else:
            left += p.numel()
            kind = block.kind if block is not None else why.kind if why is not None else ""
            kind = kind or "parameters outside of layers"
            kinds[kind] = kinds.get(kind, 0) + p.numel()
    share = covered / max(1, covered + left)
    text = f"{100 * share:.1f}% of trained parameters are preconditioned"
    if share >= _LEAST_COVERED:
        return "coverage", text, "ok", ""
    most = ", ".join(sorted(kinds, key=kinds.__getitem__, reverse=True)[:3])
    return (
        "coverage",
        f"{text}, not {most}",
        "low",
        "kfac.coverage() says why; natgrad.register() teaches a layer, and exclude=... says that "
        "this is meant.",
    )


def _statistics(kfac: Looked) -> Row:
    # A token for masked images that are not trained on has no gradient, and is missed by nobody.
    named = [b for b in kfac.blocks if not isinstance(b.layers[0], Bare)]
    # An expert that had no row yet waits for one, beside others that had some.
    begun = {id(x.stack) for b in named if isinstance(x := b.layers[0], Expert) and b.ready}
    silent = [
        block
        for block in named
        if not (block.lost or block.ready or id(getattr(block.layers[0], "stack", None)) in begun)
    ]
    if not silent or not kfac.steps:
        found = f"{len(kfac.blocks) - len(silent)} of {len(kfac.blocks)} blocks have theirs"
        return "statistics", found, "ok", ""
    names = ", ".join(repr(block.name) for block in silent[:3])
    return (
        "statistics",
        f"{len(silent)} of {len(kfac.blocks)} blocks have none ({names})",
        "missing",
        "Call these modules themselves in the forward pass that is trained, or exclude them.",
    )


def _loss(kfac: Looked) -> Row:
    settings = kfac.settings
    if not settings.finds:
        return "loss", f"as said: {settings.loss!r}", "ok", ""
    if settings.unknown:
        needed = settings.damping is not None and not isinstance(settings.damping, Relative)
        return (
            "loss",
            "its scale is not known, as its gradient is that of no cross-entropy"
            + ", and steps are as long as gradients make them" * settings.unscaled,
            "unknown" if needed else "ok",
            f"Your damping is a number and needs it: leave that out, or pass loss=... {_GAUSSIAN}"
            if needed
            else "",
        )
    if kfac.curvature.of_residuals:
        return "loss", "as residuals(...) say", "ok", ""
    if not kfac.finding.finds:
        return "loss", "not looked for, as its scale does not matter here", "ok", ""
    if settings.found is None:
        return "loss", "not seen yet", "ok", ""
    terms = f"{settings.found.terms:,.0f} terms"
    times = "" if settings.found.kind == "mean" else f"{settings.found.first:,.4g} times "
    return "loss", f"found: {times}a mean over {terms}", "ok", ""


def _share(found: dict[str, float], size: dict[str, int], low: float, high: float) -> float:
    """Of the parameters whose block is between these numbers."""
    inside = sum(size[name] for name, value in found.items() if low <= value <= high)
    return inside / max(1, sum(size[name] for name in found))


def _curvature(kfac: Looked, damped: dict[str, float], size: dict[str, int]) -> Row:
    if not damped:
        return "curvature", "relative to it is the damping, or its length is another", "ok", ""
    middle = median(damped.values())
    text = f"damping is {100 * middle:.3g}% of what gradients were divided by (median)"
    if _share(damped, size, _ALL_DAMPED, float("inf")) > 0.5:
        return (
            "curvature",
            f"The curvature is far below the damping: {text}",
            "too much damping",
            _other_damping("Lower", kfac.settings),
        )
    # Gauss-Newton matrices of differential equations reach over many orders of magnitude.
    if not kfac.curvature.of_residuals and _share(damped, size, 0.0, _UNDAMPED) > 0.5:
        return (
            "curvature",
            f"The curvature is far above the damping: {text}",
            "too little damping",
            _other_damping("Raise", kfac.settings),
        )
    return "curvature", text, "ok", ""


_GAUSSIAN = (
    "Squared errors have a scale with "
    "curvature=natgrad.MonteCarloFisher(likelihood=natgrad.curvature.Gaussian())."
)


def _other_damping(change: str, settings: KFACSettings) -> str:
    """What to do about it; a loss that nobody has passed cannot be left out."""
    if settings.unknown:
        return f"The scale of the loss is not known. {_GAUSSIAN}"
    if settings.finds:
        return f"{change} it, or pass damping=natgrad.Relative()."
    return (
        f"{change} it, pass damping=natgrad.Relative(), or leave loss=... out so that the scale is "
        "found."
    )


def _direction(kfac: Looked, cosines: dict[str, float], size: dict[str, int]) -> Row:
    if not cosines:
        return "direction", "not looked at yet: the next refresh is", "ok", ""
    same = _share(cosines, size, _SAME_DIRECTION, float("inf"))
    text = f"cosine to the plain gradient {median(cosines.values()):.2f} (median)"
    if same <= 0.5:
        return "direction", text, "ok", ""
    return (
        "direction",
        f"Gradients are hardly turned, in {100 * same:.0f}% of parameters by less than 6 degrees: "
        f"{text}",
        "same as plain",
        "Lower the damping, or batches are too small to show any curvature."
        if isinstance(kfac.settings.damping, Relative)
        else "Lower the damping or pass damping=natgrad.Relative(); batches may be too small to "
        "show any curvature.",
    )


def _cost(kfac: Looked) -> Row:
    seen, monitor = kfac.monitor.steps_without, kfac.monitor
    if not seen:
        return "cost", "not measured yet", "ok", ""
    step = max(median(seen), 1e-9)
    text = (
        f"the first refresh took {seconds_text(monitor.first_refresh)}, a training step without "
        f"K-FAC {seconds_text(step)}"
    )
    if monitor.first_refresh < _SHORT or monitor.first_refresh <= _STEPS_OF_A_REFRESH * step:
        return "cost", text, "ok", ""
    return (
        "cost",
        f"Refreshes are expensive: {text}",
        "slow",
        "Refresh less often (refresh_every), use natgrad.Cholesky(), or exclude the widest layers; "
        "kfac.plan and kfac.memory() show which.",
    )


def _numbers(kfac: Looked) -> Row:
    dropped = sum(int(block.dropped) for block in kfac.blocks)
    failed = sum(block.failures for block in kfac.blocks)
    zeroed = kfac.preconditioning.zeroed
    if not (dropped or failed or zeroed):
        return "numbers", "all finite", "ok", ""
    return (
        "numbers",
        f"{zeroed} steps, {dropped} updates and {failed} decompositions had numbers that are not "
        "finite",
        "not finite",
        "Lower the learning rate, raise the damping, or look for the batch: those were left out.",
    )
