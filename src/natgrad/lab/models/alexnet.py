"""AlexNet (Krizhevsky et al. 2012): five convolutions, of which three see half of the channels
each, and three linear layers with 58.6 of its 61.0 million parameters."""

from torch import nn


def alexnet(classes: int = 1000) -> nn.Sequential:
    """``[n, 3, 224, 224] -> [n, classes]``, with the two towers of the paper as groups.

    Arguments:
        classes: number of outputs.
    """
    layers: list[nn.Module] = []
    inputs = 3
    # Outputs, side of the kernel, stride, padding, groups, and whether it is normalised, pooled.
    for outputs, side, stride, padding, groups, normalised, pooled in (
        (96, 11, 4, 2, 1, True, True),
        (256, 5, 1, 2, 2, True, True),
        (384, 3, 1, 1, 1, False, False),
        (384, 3, 1, 1, 2, False, False),
        (256, 3, 1, 1, 2, False, True),
    ):
        layers.append(nn.Conv2d(inputs, outputs, side, stride, padding, groups=groups))
        layers.append(nn.ReLU(inplace=True))
        if normalised:
            layers.append(nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0))
        if pooled:
            layers.append(nn.MaxPool2d(3, 2))
        inputs = outputs
    layers.append(nn.Flatten())
    for inputs, outputs in ((256 * 6 * 6, 4096), (4096, 4096)):
        layers += [nn.Dropout(), nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, classes))
