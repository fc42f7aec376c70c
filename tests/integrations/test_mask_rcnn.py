"""Mask R-CNN by torchvision with K-FAC on its two heads (Pauloski 2022), on drawn shapes.

Skipped without torchvision, which has an environment of its own: make test-vision.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import natgrad
from natgrad import KFAC
from natgrad.lab import data
from natgrad.lab.models import MASK_RCNN_HEADS, mask_rcnn, small_mask_rcnn, vision
from natgrad.lab.reproduce import ITEMS, reproduce
from natgrad.lab.train import preset, toml, train
from natgrad.lab.train.logs import read
from unit.lab.train import digit_runs as runs

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="torchvision is not installed (make test-vision)"
)
HERE = Path(__file__).parent
SIDE = 96
HEADS = natgrad.MeanLoss(regions=MASK_RCNN_HEADS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data.draw_shapes(tmp_path_factory.mktemp("shapes"), train=12, test=4, side=SIDE)


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def settings(folder, **others):
    """The preset, made small."""
    values = {
        "folder": str(folder),
        "network": "mask-rcnn-small",
        "image": SIDE,
        "width": 8,
        "batch_size": 4,
        "micro_batch": 2,
        "epochs": 0.0,
        "steps": 4,
        "warmup": 0.0,
        "lr": 0.02,
        "update_every": 1,
        "refresh_every": 2,
        "evaluate_every": 100,
        "checkpoint_every": 2,
        "log_every": 1,
        "workers": 0,
    }
    return preset("mask-rcnn", **{**values, **others})


def own_roi_align():
    """torchvision's own form in Python, in a copy of its module that nobody has changed."""
    found = find_spec("torchvision.ops.roi_align")
    spec = spec_from_file_location("torchvision.ops.roi_align_itself", found.origin)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._roi_align.__wrapped__  # not compiled


def test_what_stands_in_for_compiled_operators():
    vision.torchvision()
    own, ops = own_roi_align(), import_module("torchvision.ops")
    x = torch.randn(2, 3, 13, 17, dtype=torch.float64, requires_grad=True)
    corners = torch.rand(6, 2, dtype=torch.float64) * 30
    boxes = torch.cat([corners, corners + 0.1 + 20 * torch.rand(6, 2, dtype=torch.float64)], 1)
    regions = torch.cat([torch.tensor([[0.0], [1], [0], [1], [1], [0]]), boxes], 1)
    for samples in (2, -1):
        found = vision.roi_align(x, regions, 0.25, 7, 5, samples, False)
        torch.testing.assert_close(found, own(x, regions, 0.25, 7, 5, samples, False))
        torch.testing.assert_close(found, ops.roi_align(x, regions, (7, 5), 0.25, samples))
    kept = ops.nms(boxes.float(), torch.rand(6), 0.3)
    assert 0 < len(kept) <= 6


def test_both_networks_have_the_parts_of_the_paper():
    with torch.device("meta"):
        full = mask_rcnn(91)
    small = small_mask_rcnn(4)
    # As torchvision says of its own, whose norms are frozen.
    norms = [m for m in full.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    own = sum(p.numel() for norm in norms for p in norm.parameters())
    assert sum(p.numel() for p in full.parameters()) - own == 44_401_393
    heads = {name for name, _ in small.roi_heads.named_children()}
    assert heads == {name for name, _ in full.roi_heads.named_children()}


def test_coverage(folder):
    """K-FAC is for the box head and the mask head, and for nothing else."""
    model = small_mask_rcnn(4, width=8, side=SIDE)
    kfac = KFAC(model, kl_clip=None, include=MASK_RCNN_HEADS, loss=HEADS)
    covered = {id(p) for block in kfac.blocks for p in block.parameters}
    heads = model.roi_heads
    parts = (heads.box_head, heads.box_predictor, heads.mask_head, heads.mask_predictor)
    assert covered == {id(p) for part in parts for p in part.parameters()}
    for row in kfac.coverage().rows:
        assert ("not among include" in row[-1]) == (not row[0].startswith("roi_heads."))
    terms = {block.name: block.region_terms for block in kfac.blocks}
    assert {v for n, v in terms.items() if ".box_" in n} == {1}
    assert {v for n, v in terms.items() if ".mask_" in n} == {784}


def batch(folder, rows):
    images, targets = data.coco_folder(folder).train.take(rows, [[]] * len(rows))
    named = [{n: v.double() if v.is_floating_point() else v for n, v in t.items()} for t in targets]
    return [image.double() for image in images], named


def preconditioned(images, targets, sizes):
    """In micro-batches of these sizes; all regions are looked at, so that none is drawn."""
    torch.manual_seed(0)
    model = small_mask_rcnn(4, width=4, side=SIDE).double()
    heads = model.roi_heads
    heads.fg_bg_sampler.batch_size_per_image = 2000
    heads.fg_bg_sampler.positive_fraction = 0.5
    kfac = KFAC(model, kl_clip=None, include=MASK_RCNN_HEADS, loss=HEADS)
    seen, first = [], 0
    heads.mask_head.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    heads.box_head.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for size in sizes:
        some = slice(first, first + size)
        losses = model(images[some], targets[some])
        # Region proposals have a loss of their own, over anchors that are drawn at random.
        mine = [losses[name] for name in ("loss_classifier", "loss_box_reg", "loss_mask")]
        (sum(mine) * size / len(images)).backward()
        first += size
    kfac.step()
    return {n: p.grad for n, p in heads.named_parameters()}, seen


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [1, 3]], ids=str)
def test_micro_batches(folder, sizes):
    """Copies of one image have equally many regions and masks: then the loss is the same in parts
    of any size, and so is the preconditioned gradient of both heads."""
    images, targets = batch(folder, [0])
    whole, seen = preconditioned(images * 4, targets * 4, [4])
    parts, _ = preconditioned(images * 4, targets * 4, sizes)
    assert seen[0] > 4 * 64  # more than are usually looked at
    assert seen[1] % 4 == 0 < seen[1]
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-8, atol=1e-10, msg=name)


def test_the_loss_falls(folder):
    """All five, on four images."""
    torch.manual_seed(0)
    model = small_mask_rcnn(4, width=8, side=SIDE)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    heads = {"include": MASK_RCNN_HEADS, "loss": HEADS}
    kfac = KFAC(model, optimizer, damping=0.3, **heads)
    images, targets = data.coco_folder(folder).train.take(range(4), [[]] * 4)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        losses = model(images, targets)
        sum(losses.values()).backward()
        kfac.step()
        optimizer.step()
        history.append(torch.stack(list(losses.values())).detach())
    early, late = torch.stack(history[:4]).mean(0), torch.stack(history[-4:]).mean(0)
    assert late.sum() < 0.35 * early.sum()
    named = dict(zip(losses, (late / early).tolist(), strict=True))
    for name in ("loss_classifier", "loss_mask", "loss_objectness"):
        assert named[name] < 0.6, named


def test_a_run_goes_on_bit_for_bit(folder, tmp_path):
    """`natgrad train`: log, metrics, checkpoints; and as if it had not been interrupted."""
    outcome = train(settings(folder), tmp_path / "whole")
    assert outcome.metrics.keys() == {"loss", "box_ap", "box_ap50", "mask_ap", "mask_ap50"}
    train(settings(folder, steps=2), tmp_path / "parts")
    again = train(settings(folder), tmp_path / "parts", resume=True)
    runs.assert_same(tmp_path / "whole", tmp_path / "parts")
    assert again.metrics == outcome.metrics
    losses = [line["loss"] for line in read(tmp_path / "parts") if line["kind"] == "train"]
    assert losses == [line["loss"] for line in read(tmp_path / "whole") if line["kind"] == "train"]
    assert len(losses) == 4


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_precisions(folder, tmp_path, precision):
    outcome = train(settings(folder, steps=1, precision=precision), tmp_path)
    assert 0 < outcome.metrics["loss"] < 100


@pytest.mark.distributed
def test_two_processes(folder, tmp_path):
    """Under torchrun, with DDP: all ranks have the same weights and metrics."""
    file = tmp_path / "settings.toml"
    file.write_text(toml.written(settings(folder, steps=3)), encoding="utf-8")
    paths = [str(Path(natgrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(str(HERE / "mask_rcnn_ranks.py"), str(file)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("ranks "))
    found = json.loads(line.removeprefix("ranks "))
    for name in ("weights", "metrics"):
        one, other = found[name]
        assert one == other


def test_the_example(folder, tmp_path):
    """It says how it goes and draws; without a folder it draws shapes for itself."""
    example = HERE.parents[1] / "examples" / "mask_rcnn.py"
    own = ["--sgd", "--drawn", "10", "--side", "64"]
    # Two rows of images, each enlarged to about 240 pixels.
    for given, size in ((["--data", str(folder)], (4 * 192, 2 * 192)), (own, (2 * 192, 2 * 192))):
        picture = tmp_path / f"{len(given)}.png"
        command = [sys.executable, str(example), "--steps", "2", "--batch", "2", *given]
        run = subprocess.run(
            [*command, "--out", str(picture)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        assert "step 2 of 2: loss " in run.stdout
        assert "AP of boxes 0." in run.stdout
        assert ("K-FAC took" in run.stdout) == ("--sgd" not in given)
        with import_module("PIL.Image").open(picture) as drawn:
            assert drawn.size == size


def test_its_item_of_the_papers(tmp_path):
    """Four runs of two steps, whose numbers are in the table; a second call measures nothing."""
    told, item = [], ITEMS["mask-rcnn"]
    found = reproduce(item, tmp_path, 1, told.append, smoke=True)
    (result,) = found.results
    runs = [run for of in result["runs"].values() for run in of.values()]
    assert [run["steps"] for run in runs] == [2] * 4
    for run, row in zip(runs, found.table().rows, strict=True):
        assert row[3] == f"{run['loss']:.3f}"
    sgd, kfac = (result["runs"][name]["long"]["loss"] for name in ("SGD", "K-FAC on the heads"))
    assert sgd != kfac
    assert len(found.findings()) == len(item.findings())
    count = len(told)
    assert reproduce(item, tmp_path, 1, told.append, smoke=True).results == found.results
    assert not [text for text in told[count:] if "seed" in text]
