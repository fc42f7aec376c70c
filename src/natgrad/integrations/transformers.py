"""K-FAC in Hugging Face's ``Trainer``, which makes its optimizer when it begins to train::

    trainer = Trainer(model, args, ..., callbacks=[KFACCallback(damping=0.01)])

Where the optimizer is yours, one line in front of the trainer does the same, and needs no callback:
``natgrad.KFAC(model, optimizer).attach()`` and ``Trainer(..., optimizers=(optimizer, None))``.
"""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from natgrad.errors import SettingError
from natgrad.integrations.logged_values import logged_values
from natgrad.kfac.attaching import KEY
from natgrad.preconditioner import KFAC

try:
    Base: Any = import_module("transformers").TrainerCallback
except ImportError:
    raise SettingError(
        "This callback is one of transformers, which is not installed: pip install "
        "'natgrad[frameworks]'."
    ) from None


class KFACCallback(Base):  # type: ignore[misc]
    """Makes K-FAC when the optimizer is there, resumes it, and logs its values.

    On several processes it gathers K-FAC's state before a checkpoint is saved, which the first one
    does alone.

    Arguments:
        kfac: one that hangs on the trainer's optimizer already, or that of a ``NaturalMuon``; None
            makes one.
        **settings: those of `natgrad.KFAC`.
    """

    def __init__(self, kfac: KFAC | None = None, **settings: Any) -> None:
        if kfac is not None and settings:
            raise SettingError(
                f"kfac is made, so that {', '.join(settings)} would change nothing: pass them to "
                "the KFAC, or leave kfac out."
            )
        self.kfac, self.settings = kfac, settings
        self._makes = kfac is None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make K-FAC for the model and optimizer of this training."""
        if not self._makes:
            return
        if self.kfac is not None:  # of a training before
            self.kfac.detach()
        self.kfac = KFAC(kwargs["model"], kwargs["optimizer"], **self.settings).attach()
        if state.global_step:
            _resume(self.kfac, args, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks are here together; later the first one saves alone."""
        if self.kfac is not None and control.should_save and not self.kfac.team.alone:
            self.kfac.state_dict()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As at the end of a step."""
        self.on_step_end(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add K-FAC's values to those that are logged."""
        if self.kfac is not None and state.log_history:
            found = logged_values(self.kfac)
            state.log_history[-1].update(found)
            if (logs := kwargs.get("logs")) is not None:
                logs.update(found)


def _resume(kfac: KFAC, args: Any, step: int) -> None:
    """The trainer has loaded the optimizer's state when nobody looked for K-FAC's in it."""
    given = args.resume_from_checkpoint
    folders = [Path(args.output_dir) / f"checkpoint-{step}"]
    if isinstance(given, str):
        folders.insert(0, Path(given))
    for folder in folders:
        if (file := folder / "optimizer.pt").is_file():
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            if KEY in saved:
                kfac.load_state_dict(saved[KEY])
                return
    warnings.warn(
        f"No state of K-FAC was found in {' or '.join(map(str, folders))}, so that its curvature "
        "begins anew: set TrainingArguments(resume_from_checkpoint=...) to the folder of the "
        "checkpoint, or make the optimizer and KFAC(model, optimizer).attach() before the Trainer.",
        stacklevel=2,
    )
