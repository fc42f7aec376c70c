"""Layers that see regions of samples: each region counts, however the samples are shown.

The model looks at some regions of every image, the mask head only at some of those; losses are
means over regions, and over pixels of masks. The oracle is a preconditioner for each head, which is
told how many terms its loss had.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_keywords import grouped
from natgrad import EKFAC, KFAC, Diagonal, ExactFisher, Full, Kronecker, MeanLoss, UnitWise
from natgrad.comm import Alone
from natgrad.errors import CoverageError, SettingError
from oracles import close

PIXELS = 4  # of a mask
REGIONS = {"box": 1, "mask*": PIXELS}
STRUCTURES = [
    Kronecker(),
    Kronecker(sharing="reduce"),
    EKFAC(),
    UnitWise(),
    Diagonal(),
    Full(),
]


def labels(regions):
    return (regions[:, 1] > 0).long() + (regions[:, 2] > 0)


def same(found, expected):
    for name in expected:
        assert close(found[name], expected[name], 1e-10), name


class Detector(nn.Module):
    """Images ``[k, 5]`` have any number of regions; those whose first feature is above 0 have a
    mask. Returns the two losses, each a mean."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(5, 6)
        self.box = nn.Linear(6, 3)
        self.mask = nn.Sequential(nn.Conv1d(6, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 1))
        self.seen = {"box": 0, "mask": 0}

    def forward(self, images):
        features = torch.tanh(self.backbone(torch.cat(images)))
        chosen = features[torch.cat(images)[:, 0] > 0]
        self.seen["box"] += len(features)
        self.seen["mask"] += len(chosen) * PIXELS
        line = torch.linspace(-1, 1, PIXELS, dtype=features.dtype)
        masks = self.mask(chosen.unsqueeze(2) * line)
        box = self.box(features)
        return {
            "box": F.cross_entropy(box, labels(torch.cat(images))),
            "mask": F.binary_cross_entropy_with_logits(masks, (chosen[:, :1, None] > line).double())
            if len(chosen)
            else masks.sum() * 0,
        }


def images(counts, masks=None):
    """So many regions in each, and of these so many with a mask."""
    found = [torch.randn(count, 5, dtype=torch.float64) for count in counts]
    for i, image in enumerate(found):
        signs = torch.ones(len(image)) if masks is None else torch.full((len(image),), -1.0)
        if masks is not None:
            signs[: masks[i]] = 1.0
        image[:, 0] = image[:, 0].abs() * signs
    return found


def gradients(data, sizes, steps=2, **settings):
    """After steps on the same weights and images, in micro-batches of these sizes."""
    torch.manual_seed(1)
    model = Detector().double()
    common = {"kl_clip": None, "damping": 0.03, "update_every": 1, "refresh_every": 100}
    settings = {**common, **settings}
    apart = settings.pop("apart", False)
    parts = [["box"], ["mask*"]] if apart else [["box", "mask*"]]
    told = {} if apart else {"regions": REGIONS}
    made = [KFAC(model, include=names, **grouped(**told, **settings)) for names in parts]
    for _ in range(steps):
        model.zero_grad()
        model.seen = {"box": 0, "mask": 0}
        first = 0
        for size in sizes:
            losses = model(data[first : first + size])
            (sum(losses.values()) * size / len(data)).backward()
            first += size
        for kfac, name in zip(made, model.seen, strict=False):
            kfac.step(samples=model.seen[name] if apart else None)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_each_head_has_its_own_number_of_terms(structure):
    data = images([3, 7, 2, 5], [2, 1, 0, 4])
    same(
        gradients(data, [4], structure=structure),
        gradients(data, [4], structure=structure, apart=True),
    )


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1]], ids=str)
def test_micro_batches_of_images_with_equally_many_regions(structure, sizes):
    """The loss is the same then, and so is the curvature."""
    data = images([5] * 4, [2] * 4)
    same(
        gradients(data, [4], structure=structure),
        gradients(data, sizes, structure=structure),
    )


def test_the_box_head_does_not_depend_on_masks():
    """Images have equally many regions, but not of those with a mask."""
    data = images([5] * 4, [1, 0, 4, 3])
    whole, parts = gradients(data, [4]), gradients(data, [1, 3])
    for name in ("box.weight", "box.bias"):
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-10, atol=1e-12)


def test_micro_batches_with_different_numbers_of_regions():
    """Each is weighted as in the loss, a mean of means: ``F = sum_m n_m / N 1 / R_m sum_r g g^T``
    with gradients ``g`` of a region's own loss."""
    data = images([2, 6, 3, 4])
    sizes, total = [1, 3], 4
    torch.manual_seed(1)
    model = Detector().double()
    kfac = KFAC(
        model, include="box", loss=MeanLoss(regions={"box": 1}), structure=Full(), kl_clip=None
    )
    expected = torch.zeros(21, 21, dtype=torch.float64)
    first = 0
    for size in sizes:
        part = data[first : first + size]
        (model(part)["box"] * size / total).backward()
        features = torch.tanh(model.backbone(torch.cat(part))).detach()
        rows = torch.cat([features, torch.ones(len(features), 1)], 1)
        truth = labels(torch.cat(part))
        for i, row in enumerate(rows):
            error = model.box(row[:-1]).softmax(0).detach() - F.one_hot(truth[i], 3)
            gradient = torch.outer(error, row).flatten()
            expected += size / total / len(rows) * torch.outer(gradient, gradient)
        first += size
    kfac.step()
    (block,) = kfac.blocks
    found = block.forms["F"].dense(block.running["F"].mean)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_pass_in_which_a_head_sees_nothing():
    data = images([3, 2], [0, 0])
    found = gradients(data, [2])
    assert not found["mask.0.weight"].any()
    assert found["box.weight"].any()


def test_terms_per_sample_are_those_of_other_layers():
    """A head's number of terms is its own, whatever the rest of the model has."""
    data = images([3, 7, 2, 5], [2, 1, 0, 4])
    same(gradients(data, [4]), gradients(data, [4], terms_per_sample=9))


def test_what_is_refused():
    def kfac(**settings):
        return KFAC(Detector(), kl_clip=None, **grouped(group=Alone(), **settings))

    with pytest.raises(SettingError) as error:
        kfac(regions=REGIONS, curvature=ExactFisher())
    assert str(error.value) == (
        "regions are counted in the backward pass of the loss, which "
        "ExactFisher(likelihood=Categorical(class_axis=1, ignore_index=-100)) does not look at: "
        "leave them out, or pass natgrad.EmpiricalFisher()."
    )
    with pytest.raises(CoverageError) as error:
        kfac(regions={"head": 1})
    assert str(error.value) == (
        "regions has 'head', which matches no module of Detector. Names are those of "
        "named_modules(), such as 'mask.2'."
    )
