"""The gallery of models: what is covered, why something is not, and what a step costs."""

import pytest
import torch
from torch import nn

from benchmarks import model_gallery
from benchmarks.gallery_models import GalleryModel, class_loss, gallery


class Toy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(4, width), nn.PReLU(width)
        self.last = nn.Linear(width, 3)
        self.shift, self.turn = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.eye(3))

    def forward(self, x):
        return self.last(self.act(self.first(x))) @ self.turn + self.shift


TOY = GalleryModel(
    "toy",
    "nobody's",
    lambda full: Toy(1000 if full else 8),
    lambda: {"x": torch.randn(6, 4), "labels": torch.randint(3, (6,))},
    class_loss,
)


def test_what_is_covered_at_full_size():
    found = model_gallery.covered(TOY)
    known = 1000 * 5 + 3 * 1001 + 3
    assert (found.parameters, found.covered, found.blocks) == (known + 1000 + 9, known, 3)
    why = "in forward it enters matmul()"
    assert dict(found.left) == {"`weight` of PReLU": 1000, f"`turn` of Toy: {why}": 9}
    assert found.weights == 4 * found.parameters
    assert found.bytes > 4 * (5 * 5 + 1000 * 1000)  # two factors of the first layer
    cells = model_gallery.cells(TOY, found, None)
    assert cells[2:5] == ("9.02k", "88.8%", "3")
    assert cells[-1] == f"`weight` of PReLU (1k); `turn` of Toy: {why} (9)"


def test_what_a_step_costs():
    found = model_gallery.cost(TOY, repeats=1)
    assert set(found.seconds) == {"plain", "stale", "update", "both"}
    seconds = {"plain": 1.0, "stale": 1.1, "update": 2.0, "both": 11.0}
    assert model_gallery.Cost(seconds).ratio == pytest.approx((90 * 1.1 + 9 * 2.0 + 11.0) / 100)


@pytest.mark.parametrize("name", ["Gemma", "BART", "DINOv2", "Mixtral"])
def test_small_ones_train(name):
    """Those with scaled embeddings, tied ones, layer scales and experts: K-FAC sees every block."""
    pytest.importorskip("transformers")
    (entry,) = (one for one in gallery() if one.name == name)
    torch.manual_seed(0)
    step = model_gallery.Trainer(entry, entry.build(False), "both")
    step()
    assert step.kfac is not None
    used = [b for b in step.kfac.blocks if not b.name.endswith("mask_token")]  # for masked images
    assert all(block.ready for block in used)
    left = {why.kind for why in step.kfac.uncovered.values()}
    assert not left & {"GemmaTextScaledWordEmbedding", "Dinov2LayerScale"}
