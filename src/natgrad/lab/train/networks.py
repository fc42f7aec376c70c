"""The network of a task: that of its name, or of the user's function, if the loss goes with it."""

from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.models import he_normal_
from natgrad.lab.models.by_name import NetworkSizes, TaskShapes
from natgrad.lab.names import NETWORKS
from natgrad.lab.train.settings import Settings


def build(settings: Settings, shapes: TaskShapes) -> nn.Module:
    """With weights as they are drawn now."""
    network = NETWORKS[settings.network]
    others = [one for one in NETWORKS.entries().values() if settings.loss in one.losses]
    if network.losses and settings.loss not in network.losses:
        which = f", which goes with {', '.join(one.name for one in others)}" if others else ""
        raise SettingError(
            f"network {network.name} goes with loss {' or '.join(network.losses)} but the loss is "
            f"{settings.loss}{which}: name another network, or another loss."
        )
    sizes = NetworkSizes(
        settings.width,
        settings.layers,
        settings.heads,
        settings.dropout,
        settings.context,
        settings.image,
    )
    model = network.build(shapes, sizes)
    return he_normal_(model) if settings.he_normal else model
