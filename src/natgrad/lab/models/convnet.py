"""A small convolutional network: convolution, ReLU and pooling twice, then a linear layer."""

from torch import nn


def convnet(
    image: tuple[int, int, int] = (1, 28, 28),
    *,
    channels: tuple[int, int] = (16, 32),
    classes: int = 10,
    batch_norm: bool = False,
) -> nn.Sequential:
    """``[n, *image] -> [n, classes]``, such as for images of 28 x 28 or 8 x 8.

    Arguments:
        image: channels, height and width of the images, at least 4 x 4.
        channels: of the two convolutions.
        classes: number of outputs.
        batch_norm: whether a BatchNorm follows each convolution, which then has no bias.
    """
    inputs, height, width = image
    layers: list[nn.Module] = []
    for outputs in channels:
        # A bias would be taken away again by the norm's mean.
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        inputs, height, width = outputs, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * height * width, classes))
