"""Everything that knows of other processes."""

import torch.distributed as dist

__all__ = ["world_size"]


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
