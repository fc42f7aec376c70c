"""Plain models of several ranks that change while they are trained: the ranks stay alike."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from natgrad import KFAC


class Words(nn.Module):
    """With an embedding whose gradient is sparse, and parts that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, sparse=True)
        self.frozen, self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.frozen(self.words(tokens)).tanh()).tanh())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(k, (8,), generator=generator) for k in (9, 3))


def trained(alone: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps between which layers are unfrozen, replaced and frozen again."""
    torch.manual_seed(0)
    model = Words().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    kfac = None if alone else KFAC(model, optimizer, exclude=["hidden"])
    said = []
    for step in range(8):
        if step == 2:
            model.frozen.requires_grad_(True)
        if step == 4:
            torch.manual_seed(1)
            model.hidden.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if step == 6:
            model.head.requires_grad_(False)
        optimizer.zero_grad()
        ranks = range(2) if alone else [dist.get_rank()]
        x, y = (torch.cat(t) for t in zip(*(batch(2 * step + r) for r in ranks), strict=True))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            F.cross_entropy(model(x), y).backward()
            if kfac is not None:
                kfac.step()
        said += [str(one.message) for one in found]
        # Covered parameters are left alone, so that all others show plain averages.
        model.head.zero_grad()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, said


def both() -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    theirs, said = trained(alone=False)
    return theirs, trained(alone=True)[0], said


def test_what_is_unfrozen_or_replaced_is_averaged(world):
    """Sparse gradients as well. The gradients without a block are those of one process."""
    results = world.run(both, ranks=2)
    for found, expected, said in results:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], msg=name)
        assert any("'frozen.weight' and 1 others were frozen, or not there" in one for one in said)
        assert any("'hidden.weight'" in one for one in said)
    for name, weight in results[0][0].items():
        assert torch.equal(weight, results[1][0][name]), name
