"""Random numbers that torch does not draw from a generator of one's own, such as Beta ones."""

import numpy as np
import torch

from natgrad.errors import SettingError


def check_generator(generator: torch.Generator | None, owner: str) -> None:
    if generator is not None and generator.device.type != "cpu":
        raise SettingError(
            f"{owner}.generator is on {generator.device} but must be on the CPU, where the few "
            "numbers of a batch are drawn: pass torch.Generator()."
        )


def numpy_generator(generator: torch.Generator | None) -> np.random.Generator:
    """Seeded by one number of torch's, so that torch's state is all there is to save."""
    seed = torch.randint(2**63 - 1, (), generator=generator)
    return np.random.default_rng(int(seed))
