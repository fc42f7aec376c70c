"""AlexNet has the sizes of its paper."""

import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.models import alexnet
from natgrad.lab.models.by_name import NetworkSizes, TaskShapes
from natgrad.lab.names import NETWORKS


def test_sizes():
    with torch.device("meta"):
        model = alexnet()
        output = model(torch.empty(2, 3, 224, 224))
    assert output.shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 60_965_224
    linear = [m for m in model if isinstance(m, torch.nn.Linear)]
    assert sum(p.numel() for m in linear for p in m.parameters()) == 58_631_144


def test_other_images_are_refused():
    with pytest.raises(SettingError) as error:
        NETWORKS["alexnet"].build(TaskShapes((3, 32, 32), 10), NetworkSizes())
    assert str(error.value) == (
        "network alexnet takes images of 3 x 224 x 224 but those of the data are 3 x 32 x 32: name "
        "another network, or other data."
    )
