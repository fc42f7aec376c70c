"""U-Net for segmentation: down by pooling, up again, and at every size what was seen on the way."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.errors import SettingError


class UNet(nn.Module):
    """``[n, inputs, h, w] -> [n, outputs, h, w]`` logits, for sides that 2^levels divides (KAISA).

    Every size has two 3x3 convolutions with norm and ReLU; the width doubles from one size to the
    next smaller one.

    Arguments:
        inputs: channels of the images.
        outputs: channels of the logits.
        width: channels at the full size.
        levels: how often the sides are halved and doubled again.
    """

    def __init__(
        self, inputs: int = 1, outputs: int = 1, *, width: int = 32, levels: int = 4
    ) -> None:
        super().__init__()
        if min(inputs, outputs, width, levels) < 1:
            raise SettingError(
                f"A U-Net has {inputs} inputs, {outputs} outputs, width {width} and {levels} "
                "levels but each must be at least 1: pass such numbers."
            )
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _convolutions(before, after)
            for before, after in zip([inputs, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(_convolutions(2 * size, size) for size in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, outputs, 1)
        self.divisor = 1 << levels

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, outputs, h, w]``.

        Arguments:
            x: ``[n, inputs, h, w]``; sides that 2^levels does not divide raise.
        """
        if any(side % self.divisor for side in x.shape[2:]):
            raise SettingError(
                f"A U-Net of {len(self.up)} levels was given images of {list(x.shape[2:])} but "
                f"needs sides that {self.divisor} divides: crop or pad them."
            )
        seen = [self.down[0](x)]
        for block in self.down[1:]:
            seen.append(block(F.max_pool2d(seen[-1], 2)))
        y = seen.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat((up(y), seen.pop()), 1))
        logits: Tensor = self.head(y)
        return logits


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        # A bias would be taken away again by the norm's mean.
        layers += [
            nn.Conv2d(before, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
