"""K-FAC in Lightning's ``Trainer``, around the optimizers that a module configures::

    trainer = Trainer(callbacks=[KFACCallback(damping=0.01)])

A module that makes it itself needs no callback: in ``configure_optimizers``,
``natgrad.KFAC(self.net, optimizer).attach()``. With Fabric it is the same line after
``fabric.setup``.
"""

from importlib import import_module
from typing import Any

from natgrad.errors import SettingError
from natgrad.integrations.logged_values import logged_values
from natgrad.preconditioner import KFAC

try:
    Base: Any = import_module("lightning.pytorch").Callback
except ImportError:
    raise SettingError(
        "This callback is one of Lightning (lightning), which is not installed: pip install "
        "'natgrad[frameworks]'."
    ) from None


class KFACCallback(Base):  # type: ignore[misc]
    """Makes K-FAC when the optimizers are there, before their states are restored, and logs its
    values.

    Arguments:
        module: name of the network inside the Lightning module, such as ``"net"``, that is called
            with batches; the whole module if it is empty.
        **settings: those of `natgrad.KFAC`.
    """

    def __init__(self, module: str = "", **settings: Any) -> None:
        self.module, self.settings = module, settings
        self.kfac: KFAC | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make K-FAC for the module and optimizers of this training."""
        if self.kfac is not None:  # of a training before
            self.kfac.detach()
        whole = trainer.strategy.model
        model = pl_module.get_submodule(self.module) if self.module else whole
        kfac = KFAC(model, trainer.optimizers, **self.settings)
        self.kfac = kfac.attach(all_ranks_save=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log K-FAC's values as often as the trainer logs."""
        due = trainer.logger is not None and trainer.global_step % trainer.log_every_n_steps == 0
        if self.kfac is not None and due:
            self.log_dict(logged_values(self.kfac), on_step=True, on_epoch=False)
