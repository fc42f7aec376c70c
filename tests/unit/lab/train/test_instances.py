"""The losses and metrics of Mask R-CNN, with a detector that needs no torchvision."""

import sys

import pytest
import torch
from torch import nn

from natgrad.comm import Alone
from natgrad.errors import SettingError
from natgrad.lab import data
from natgrad.lab.models import MASK_RCNN_HEADS, vision
from natgrad.lab.models.by_name import TaskShapes
from natgrad.lab.train import Settings, networks, preset, tasks
from natgrad.lab.train.instances import InstanceObjective
from natgrad.lab.train.training import Training

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data.draw_shapes(tmp_path_factory.mktemp("shapes"), train=6, test=5, side=32)


def settings(folder, **others):
    values = {"folder": str(folder), "batch_size": 4, "micro_batch": 2, "epochs": 0.0, "steps": 3}
    network = {"network": "mask-rcnn-small", "image": 32, "width": 4, "workers": 0, "target": 0.0}
    return preset("mask-rcnn", **{**values, **network, **others})


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.box_head, self.mask_head = nn.Linear(3, 2), nn.Linear(3, 1)


class Detector(nn.Module):
    """Has the parts of Mask R-CNN, and tells what it was asked. It finds all objects whose number
    in ``sees`` is among those of an image."""

    def __init__(self, sees=(0, 1, 2)):
        super().__init__()
        self.backbone = nn.BatchNorm1d(3)
        self.transform, self.rpn, self.roi_heads = nn.Identity(), nn.Identity(), Heads()
        self.sees, self.asked, self.truth = sees, [], {}

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack([image.mean((1, 2)) for image in images]))
        if not self.training:
            assert targets is None
            assert not any(module.training for module in self.modules())
            return [self.found(image) for image in images]
        parts = (self.transform, self.rpn, self.roi_heads)
        assert all(part.training for part in parts)
        self.asked.append((self.backbone.training, [len(t["boxes"]) for t in targets]))
        noise = torch.rand(())
        return {
            "box": self.roi_heads.box_head(features).square().mean(),
            "mask": self.roi_heads.mask_head(features).square().mean() + noise.to(features),
        }

    def found(self, image):
        target = self.truth[float(image.sum())]
        chosen = [i for i in range(len(target["labels"])) if i in self.sees]
        return {
            "boxes": target["boxes"][chosen],
            "labels": target["labels"][chosen],
            "scores": torch.ones(len(chosen)),
            "masks": target["masks"][chosen].unsqueeze(1).float(),
        }


def trained(folder, monkeypatch, detector, **others):
    monkeypatch.setattr(tasks.networks, "build", lambda settings, about: detector)
    training = Training(settings(folder, **others), Alone(), torch.device("cpu"))
    for row in range(len(training.task.test)):
        batch = training.task.test.take([row], [[]])
        (image,), (target,) = training.task.prepared(batch, torch.device("cpu"))
        detector.truth[float(image.sum())] = target
    return training


def test_a_run(folder, monkeypatch):
    """Images without a mean count, objects are found or not, norms are not touched by tests."""
    detector = Detector()
    training = trained(folder, monkeypatch, detector)
    assert {block.name for block in training.kfac.blocks} == {
        "roi_heads.box_head",
        "roi_heads.mask_head",
    }
    assert [block.region_terms for block in training.kfac.blocks] == [1, 784]
    for step, batches in training.batches(0):
        training.step(step, batches)
    assert [norm for norm, _ in detector.asked] == [True] * 6  # two micro-batches a step
    before = detector.backbone.running_mean.clone()
    detector.asked.clear()
    metrics = training.evaluate(training.task.test)
    assert detector.asked == [(False, counts) for _, counts in detector.asked]
    assert torch.equal(detector.backbone.running_mean, before)
    perfect = {"box_ap": 1.0, "box_ap50": 1.0, "mask_ap": 1.0, "mask_ap50": 1.0}
    assert {name: metrics[name] for name in perfect} == perfect
    assert metrics == training.evaluate(training.task.test)


def test_what_is_drawn_for_a_test_is_the_same_every_time(folder, monkeypatch):
    training = trained(folder, monkeypatch, Detector())
    torch.manual_seed(3)
    first = training.evaluate(training.task.test)
    following = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(following, torch.rand(()))  # a test takes nothing from it
    torch.manual_seed(4)
    assert training.evaluate(training.task.test) == first


def test_metrics_are_those_of_all_batches(folder, monkeypatch):
    """In batches of two, and in one."""
    detector = Detector(sees=(0,))
    training = trained(folder, monkeypatch, detector)
    metrics = training.evaluate(training.task.test)
    images, targets = training.task.test.take(range(5), [[]] * 5)
    pairs = [(detector.found(image), target) for image, target in zip(images, targets, strict=True)]
    boxes = data.average_precision([data.box_matches(*pair) for pair in pairs])
    masks = data.average_precision([data.mask_matches(*pair) for pair in pairs])
    assert (metrics["box_ap"], metrics["box_ap50"]) == (boxes.mean, boxes.half)
    assert (metrics["mask_ap"], metrics["mask_ap50"]) == (masks.mean, masks.half)
    assert 0 < boxes.half < 1
    total = 0.0
    for some in (slice(0, 2), slice(2, 4), slice(4, 5)):
        with torch.no_grad():
            losses, _ = InstanceObjective().output(detector.eval(), images[some], targets[some])
        total += float(sum(losses.values())) * len(images[some])
    assert metrics["loss"] == pytest.approx(total / 5, rel=1e-6)


def test_crowds_are_not_learnt():
    target = {
        "boxes": torch.tensor([[0.0, 0, 4, 4], [2, 2, 8, 8]]),
        "labels": torch.tensor([1, 2]),
        "masks": torch.ones(2, 32, 32),
        "area": torch.tensor([16.0, 36.0]),
        "iscrowd": torch.tensor([0, 1]),
        "image_id": torch.tensor(7),
    }
    image = torch.rand(3, 32, 32)
    detector = Detector().eval()
    detector.truth[float(image.sum())] = target
    InstanceObjective().output(detector, [image], [target])
    assert detector.asked == [(False, [1])]
    assert not any(module.training for module in detector.modules())


def test_losses_are_added_in_float32_or_better():
    losses = {"one": torch.tensor(1.0).bfloat16(), "other": torch.tensor(2.0**-10).bfloat16()}
    found = InstanceObjective().loss(losses, [])
    assert found.dtype == torch.float32
    assert float(found) == 1 + 2.0**-10


def test_precision(folder, monkeypatch):
    training = trained(folder, monkeypatch, Detector(), precision="float64")
    (image,), (target,) = training.task.prepared(
        training.task.test.take([0], [[]]), torch.device("cpu")
    )
    assert image.dtype == target["boxes"].dtype == torch.float64
    assert (target["labels"].dtype, target["masks"].dtype) == (torch.int64, torch.uint8)


def test_samples_that_are_tested_as_well_are_not_mirrored(folder, monkeypatch):
    training = trained(folder, monkeypatch, Detector(), fit_samples=2, train_samples=4)
    assert (training.task.train.chances, training.task.fit.chances) == (1, 0)


def test_the_preset():
    """Box and mask head, factors every 50 steps, refresh every 500 (Pauloski 2022, 6.3.2)."""
    found = preset("mask-rcnn")
    assert found.include == tuple(MASK_RCNN_HEADS)
    assert (found.update_every, found.refresh_every) == (50, 500)
    assert (found.metric, found.target, found.batch_size) == ("box_ap", 0.377, 64)


def test_without_torchvision(folder, monkeypatch):
    vision.torchvision.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SettingError) as error:
        Training(settings(folder), Alone(), torch.device("cpu"))
    assert str(error.value) == (
        "Mask R-CNN needs torchvision, which is not installed: pip install 'natgrad[vision]'."
    )
    vision.torchvision.cache_clear()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"fisher": "exact"},
            "fisher is exact but loss instances has no output from which targets could be drawn: "
            "leave it out.",
        ),
        ({"rescaling": True}, "rescaling is not for loss instances: leave it out."),
        (
            {"mixup": 0.4},
            "mixup mixes the targets of classes but the loss is instances: leave it out, or pass "
            "loss cross-entropy.",
        ),
        (
            {"metric": "dice", "target": 0.5},
            "metric is dice but loss instances has loss, box_ap, box_ap50, mask_ap, mask_ap50: "
            "name one of these.",
        ),
    ],
    ids=["fisher", "rescaling", "mixup", "metric"],
)
def test_settings_that_do_not_go_together(folder, values, message):
    with pytest.raises(SettingError) as error:
        settings(folder, **values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"loss": "cross-entropy", "network": "resnet18", "target": 0.0, "metric": "loss"},
            "The data coco go with loss instances but the loss is cross-entropy: name that, or "
            "other data.",
        ),
        (
            {"erasing": 0.5},
            "erasing is for images but the data coco are objects to be found: leave it out, or "
            "name other data.",
        ),
    ],
    ids=["loss", "erasing"],
)
def test_what_does_not_fit_the_data(folder, values, message):
    with pytest.raises(SettingError) as error:
        tasks.task(settings(folder, **values))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("network", "loss", "message"),
    [
        (
            "resnet18",
            "instances",
            "network resnet18 goes with loss cross-entropy but the loss is instances, which goes "
            "with mask-rcnn, mask-rcnn-small: name another network, or another loss.",
        ),
        (
            "mask-rcnn",
            "cross-entropy",
            "network mask-rcnn goes with loss instances but the loss is cross-entropy, which goes "
            "with convnet, convnet-norm, mlp, ",
        ),
    ],
    ids=["another network", "another loss"],
)
def test_networks_and_losses(folder, network, loss, message):
    chosen = settings(folder, network=network)
    if loss != "instances":
        chosen = Settings(network=network, steps=1)
    with pytest.raises(SettingError) as error:
        networks.build(chosen, TaskShapes(classes=4))
    assert str(error.value).startswith(message)
