"""K-FAC under a DeepSpeed engine, with ZeRO up to stage 2::

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    kfac = natgrad.integrations.deepspeed.KFAC(engine)
    ...
    engine.backward(loss)
    kfac.step()
    engine.step()

What ``engine.backward`` has averaged is where ``engine.step`` takes it from, not in ``.grad``.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import preconditioner
from natgrad.comm.layouts import AVERAGING
from natgrad.errors import SettingError
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.lengths import Length


class KFAC(preconditioner.KFAC):
    """`natgrad.KFAC` whose gradients are read from the engine and written back to it.

    ``settings`` are those of `natgrad.KFAC`. At stages 1 and 2 every rank has all gradients while
    ``step()`` runs, and only its share of them before and after.
    """

    def __init__(self, engine: nn.Module, **settings: Any) -> None:
        self.engine: Any = engine
        _check(self.engine)
        if type(engine) not in AVERAGING:
            AVERAGING.append(type(engine))
        distributed = settings.get("distributed", Distributed())
        if isinstance(distributed, Distributed) and distributed.group is None:
            group: Any = engine.data_parallel_group
            distributed = replace(distributed, group=group)
        settings["distributed"] = distributed
        length = settings.get("length")
        if isinstance(length, Length) and length.of_update:
            raise SettingError(
                f"length={length!r} moves weights after optimizer.step(), and a DeepSpeed engine "
                "keeps copies of them: leave it out, or pass natgrad.lengths.Graft()."
            )
        super().__init__(engine, cast(Optimizer, Rates(self.engine.optimizer)), **settings)
        # From stage 2 on, gradients leave the parameters after every micro-batch: that one is gone
        # does not say that its batch was thrown away.
        self.capture.on_restart = None

    def step(self, samples: int | None = None) -> None:
        """As often as ``engine.step()``; does nothing between the micro-batches of a step."""
        if self.engine.is_gradient_accumulation_boundary():
            with self._whole_gradients():
                super().step(samples)

    @contextmanager
    def _whole_gradients(self) -> Iterator[None]:
        """Gradients are in ``.grad`` for as long as this lasts, also those that ZeRO has cut; if it
        fails, ZeRO keeps its own as they were."""
        zero = _zero()
        parameters = [p for p in self.model.parameters() if p.requires_grad and p.grad is None]
        cut = [(p, g) for p in parameters if (g := zero.safe_get_full_grad(p)) is not None]
        try:
            for p, gradient in cut:
                p.grad = gradient.to(p.dtype)
            yield
            preconditioned = [p.grad for p, _ in cut]
        finally:
            for p, _ in cut:  # what is in .grad would be taken for ZeRO's own
                p.grad = None
        for (p, _), gradient in zip(cut, preconditioned, strict=True):
            zero.safe_set_full_grad(p, gradient)


def _zero() -> Any:
    try:
        return importlib.import_module("deepspeed.utils")
    except ImportError:
        raise SettingError(
            "Gradients of a DeepSpeed engine are read by deepspeed, which is not installed: pip "
            "install 'natgrad[deepspeed]'."
        ) from None


class Rates:
    """Learning rates by the model's own parameters: ZeRO's optimizer has flat copies of them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        names = ("bit16_groups", "bf16_groups", "fp16_groups")
        cut = (getattr(optimizer, name) for name in names if hasattr(optimizer, name))
        self._parameters: list[list[Tensor]] | None = next(cut, None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        if self._parameters is None:
            return groups
        return [
            {"params": parameters, "lr": group["lr"]}
            for parameters, group in zip(self._parameters, groups, strict=True)
        ]


def _check(engine: Any) -> None:
    # Asked of its class, as an engine has the attributes of its model, too.
    if not hasattr(type(engine), "zero_optimization_stage"):
        raise SettingError(
            f"engine is a {type(engine).__name__} but must be a DeepSpeedEngine: pass the first of "
            "what deepspeed.initialize() returned."
        )
    if engine.optimizer is None:
        raise SettingError(
            "The DeepSpeed engine has no optimizer, but K-FAC prepares gradients for one: name one "
            "in the configuration, or pass it to deepspeed.initialize()."
        )
    if hasattr(type(engine), "train_batch"):
        raise SettingError(
            "The DeepSpeed engine is a pipeline, whose train_batch() leaves no room for K-FAC "
            "before the optimizer's step: use a model without PipelineModule, or PyTorch's "
            "pipelining with KFAC(stage, distributed=Distributed(group=...))."
        )
    if (stage := engine.zero_optimization_stage()) > 2:
        raise SettingError(
            f"ZeRO has stage {stage}, which takes parameters off the model between its calls, but "
            "K-FAC needs them there: use stage 2 or lower, or fully_shard() of PyTorch."
        )
    if engine.zero_offload_optimizer() is not None:
        raise SettingError(
            "ZeRO has offload_optimizer, which moves gradients away before K-FAC can see them: "
            "leave it out, or use fully_shard() of PyTorch."
        )
    if engine.fp16_enabled():
        raise SettingError(
            "DeepSpeed has fp16 on, whose loss scale K-FAC would take for curvature: use bf16."
        )
    if not engine.managed_gradient_accumulation():
        raise SettingError(
            "DeepSpeed has managed_gradient_accumulation=False, which adds up gradients only in "
            "engine.step(), after K-FAC: leave it out and set gradient_accumulation_steps."
        )
    if norm := engine.gradient_clipping():
        warnings.warn(
            f"DeepSpeed has gradient_clipping={norm!r} (its default is 1.0), which will cut the "
            "norm of preconditioned gradients, and that norm means nothing: set it to 0.0, as "
            "kl_clip bounds the step.",
            stacklevel=3,
        )
