"""The methods of a preconditioner that save and load it: a base class of `natgrad.KFAC`."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from natgrad.comm.checkpoints import Folder
from natgrad.kfac.state import checkpoint, sharding


class Saving(checkpoint.Saveable):
    """All ranks must call each of these together: one alone waits for the others."""

    _gathered: dict[str, Any] | None = None  # by state_dict(), until the next step

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors, numbers and strings, on every rank."""
        state = checkpoint.save(self)
        self._gathered = None if self.team.alone else state
        return state

    def gathered_state(self) -> dict[str, Any] | None:
        """What all ranks have gathered by ``state_dict()`` since the last step. One rank alone may
        ask for it."""
        return self._gathered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, at any world size and placement. A state that
        does not fit changes nothing.

        Arguments:
            state: what ``state_dict()`` has returned.
        """
        checkpoint.load(self, state)
        self._prepare()

    def shards(self) -> sharding.Shards:
        """The state for ``torch.distributed.checkpoint``: a rank's own share of it."""
        return sharding.Shards(self, self._prepare)

    def save(self, folder: Folder, beside: dict[str, Any] | None = None) -> None:
        """Write the shards of all ranks. An interrupted save leaves the last good one.

        Arguments:
            folder: where they are written.
            beside: what else is saved, by name: model, optimizer, numbers.
        """
        sharding.save(self.shards(), folder, beside or {})

    def load(self, folder: Folder, beside: dict[str, Any] | None = None) -> None:
        """Continue where ``save`` was called.

        Arguments:
            folder: where the shards were written.
            beside: what else was saved, by name: objects are loaded, numbers overwritten.
        """
        sharding.load(self.shards(), folder, {} if beside is None else beside)

    @abstractmethod
    def _prepare(self) -> None:
        """Make ready for the next step."""
