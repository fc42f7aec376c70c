"""A model that changes while it is trained: its blocks follow it, or say what they leave behind."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

from natgrad import KFAC, Cholesky, MonteCarloFisher, NaturalMuon, Spectral
from natgrad.capture.changes import DIGEST
from natgrad.capture.wrappers import Compiled
from natgrad.errors import CoverageError, SettingError
from natgrad.kfac.ranks.team import Team
from natgrad.schedules import Doubling

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model: nn.Module, kfac: KFAC) -> dict[str, torch.Tensor]:
    """Returns the plain gradients."""
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    kfac.step()
    return plain


def started(model: nn.Module, **settings) -> KFAC:
    kfac = new(model, **settings)
    step(model, kfac)
    return kfac


def new(model: nn.Module, **settings) -> KFAC:
    settings = {"update_every": 1, "refresh_every": 1, **settings}
    return KFAC(model, kl_clip=None, **settings)


def unfreeze(model):
    model[2].requires_grad_(True)


def replace(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def resize(model):
    """Its outputs, and with them the inputs of the next layer."""
    for index, axis in ((2, 0), (4, 1)):
        weight = model[index].weight
        weight.data, weight.grad = torch.cat([weight.data] * 2, axis), None
    model[2].bias.data, model[2].bias.grad = model[2].bias.data.repeat(2), None
    model[2].out_features = model[4].in_features = 16


def pruned_by_replacement(model):
    """Of eight units the five with the largest weights."""
    kept = model[2].weight.detach().norm(dim=1).topk(5).indices
    smaller, behind = nn.Linear(8, 5), nn.Linear(5, 3)
    with torch.no_grad():
        smaller.weight.copy_(model[2].weight[kept])
        behind.weight.copy_(model[4].weight[:, kept])
    model[2], model[4] = smaller, behind


def merge(model):
    """What a low-rank adapter has learnt, into the weight that was frozen beside it."""
    adapted = model[2]
    adapted.base.weight.data += adapted.up.weight.data @ adapted.down.weight.data
    model[2] = adapted.base.requires_grad_(True)


def append(model):
    model.append(nn.Linear(3, 3))


def load_by_assignment(model):
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def freeze_weight(model):
    model[2].weight.requires_grad_(False)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapter() -> nn.Sequential:
    model = net()
    model[2] = Adapted(model[2])
    return model


def frozen_net() -> nn.Sequential:
    model = net()
    model[2].requires_grad_(False)
    return model


# The model before, the change, and the blocks that are as they were.
CHANGES = {
    unfreeze: (frozen_net, {"0", "4"}),
    replace: (net, {"0", "4"}),
    resize: (net, {"0"}),
    pruned_by_replacement: (net, {"0"}),
    merge: (with_adapter, {"0", "4"}),
    append: (net, {"0", "2", "4"}),
    load_by_assignment: (net, set()),
    freeze_weight: (net, {"0", "4"}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_layer_has_the_block_of_a_new_kfac(change):
    """The others have theirs, bit by bit, as if nothing had happened."""
    make, same = CHANGES[change]
    model, undisturbed = make(), make()
    kfac, quiet = started(model), started(undisturbed)
    before = {block.name: block for block in kfac.blocks}
    change(model)
    fresh_model = copy.deepcopy(model)
    plain = step(model, kfac)
    fresh = new(fresh_model)
    step(fresh_model, fresh)
    blocks, expected = ({b.name: b for b in k.blocks} for k in (kfac, fresh))
    assert list(blocks) == list(expected)
    kept = {name for name, block in blocks.items() if block is before.get(name)}
    assert kept == same
    for name in blocks.keys() - same:
        for factor, running in blocks[name].running.items():
            assert torch.equal(running.mean, expected[name].running[factor].mean), (name, factor)
        for mine, its in zip(blocks[name].parameters, expected[name].parameters, strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    assert kfac.coverage().uncovered == fresh.coverage().uncovered
    if change in (unfreeze, replace, freeze_weight):  # what others see has not changed
        step(undisturbed, quiet)
        for block in quiet.blocks:
            if block.name in same:
                mine = blocks[block.name]
                for factor, running in block.running.items():
                    assert torch.equal(mine.running[factor].mean, running.mean)
                for p, q in zip(mine.parameters, block.parameters, strict=True):
                    assert torch.equal(p.grad, q.grad)
    assert any(not torch.equal(p.grad, plain[n]) for n, p in model.named_parameters() if n in plain)
    step(model, kfac)  # and it goes on


@pytest.mark.filterwarnings("error")
def test_between_updates_a_block_comes_with_the_next_step():
    """It is due at once, and then at its own steps 1, 2, 4, …, whatever the clocks say."""
    model = frozen_net()
    kfac = new(model, update_every=Doubling(100), refresh_every=Doubling(100))
    for _ in range(21):
        step(model, kfac)
    unfreeze(model)
    counts, refreshed = [], []
    for index in range(12):
        plain = step(model, kfac)
        (block,) = (b for b in kfac.blocks if b.name == "2")
        counts.append("A" in block.running and float(block.running["A"].weight))
        refreshed.append(block.version)
        assert torch.equal(model[2].weight.grad, plain["2.weight"]) == (index == 0)
    # It was noticed at step 21, which is no update: that one leaves the plain gradient.
    changed = [i for i in range(1, 12) if counts[i] != counts[i - 1]]
    assert changed == [1, 2, 3, 5, 9, 11]  # ages 0, 1, 2, 4, 8, and step 32, when all are due
    assert [i for i in range(1, 12) if refreshed[i] != refreshed[i - 1]] == changed


def test_a_constant_interval_stays_one():
    model = frozen_net()
    kfac = new(model, update_every=10, refresh_every=10)
    for _ in range(3):
        step(model, kfac)
    unfreeze(model)
    for _ in range(3):
        step(model, kfac)
    assert kfac.newcomers.born == {}
    (block,) = (b for b in kfac.blocks if b.name == "2")
    assert block.ready
    assert float(block.running["A"].weight) == pytest.approx(0.05)  # one update


@pytest.mark.filterwarnings("error")
def test_a_layer_that_is_frozen_as_a_whole_and_comes_back():
    """As the parts of a GAN are; nothing is lost, so that nothing is made anew."""
    model = net()
    kfac = started(model)
    before = list(kfac.blocks)
    team = kfac.team
    model[2].requires_grad_(False)
    plain = step(model, kfac)
    assert kfac.coverage().uncovered == {"2.weight": "frozen", "2.bias": "frozen"}
    assert not torch.allclose(model[0].weight.grad, plain["0.weight"])
    model[2].requires_grad_(True)
    plain = step(model, kfac)
    assert kfac.coverage().uncovered == {}
    assert not torch.allclose(model[2].weight.grad, plain["2.weight"])
    assert kfac.blocks == before
    assert kfac.team is team


@pytest.mark.filterwarnings("error")
def test_a_frozen_layer_sleeps_while_another_one_is_replaced():
    model = net()
    kfac = started(model)
    asleep = kfac.blocks[1]
    model[2].requires_grad_(False)
    step(model, kfac)
    model[4] = nn.Linear(8, 3)
    step(model, kfac)
    assert kfac.blocks[1] is asleep
    means = {name: running.mean.clone() for name, running in asleep.running.items()}
    model[2].requires_grad_(True)
    kfac.settings.factor_decay = 1.0
    step(model, kfac)
    assert kfac.blocks[1] is asleep
    for name, mean in means.items():
        assert torch.equal(asleep.running[name].mean, mean)


def test_in_the_middle_of_an_accumulation_a_block_begins_with_the_next_step():
    """It has not seen all samples of this one."""
    model = frozen_net()
    kfac = started(model)
    model.zero_grad()
    F.cross_entropy(model(X[:8]), Y[:8]).backward()
    unfreeze(model)
    F.cross_entropy(model(X[8:]), Y[8:]).backward()
    kfac.step()
    (block,) = (b for b in kfac.blocks if b.name == "2")
    assert not block.running
    step(model, kfac)
    twin = copy.deepcopy(model)
    fresh = started(twin)
    (its,) = (b for b in fresh.blocks if b.name == "2")
    assert torch.equal(block.running["G"].mean, its.running["G"].mean)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("where", ["copy", "state", "folder"])
def test_copies_and_checkpoints_follow(where, tmp_path):
    model = frozen_net()
    kfac = new(model, update_every=Doubling(100), refresh_every=Doubling(100), momentum=0.9)
    for _ in range(6):
        step(model, kfac)
    unfreeze(model)
    for _ in range(2):
        step(model, kfac)
    assert kfac.newcomers.born
    if where == "copy":
        twin, its = copy.deepcopy((model, kfac))
    else:
        twin = copy.deepcopy(model)
        its = new(twin, update_every=Doubling(100), refresh_every=Doubling(100), momentum=0.9)
        if where == "state":
            its.load_state_dict(kfac.state_dict())
        else:
            kfac.save(tmp_path / "saved")
            its.load(tmp_path / "saved")
    for _ in range(5):
        step(model, kfac)
        step(twin, its)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert its.newcomers.born.values() != {}


def test_a_copy_has_not_changed():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer)
    step(model, kfac)
    twin, _, its = copy.deepcopy((model, optimizer, kfac))
    team = its.team
    step(twin, its)
    assert its.team is team
    assert its.coverage().uncovered == {"0.weight": "frozen"}


def test_an_untied_module_gives_no_statistics_to_the_weight_that_it_had():
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    model[1].weight = model[2].weight
    kfac = started(model)
    model[2].weight = nn.Parameter(torch.randn(5, 5) / 3)
    step(model, kfac)
    assert [len(block.layers) for block in kfac.blocks] == [1, 1, 1]
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    assert [block.sums["A"].count for block in kfac.blocks] == [len(X)] * 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "settings",
    [
        {"geometry": Spectral(), "momentum": 0.9},
        {"inverse": Cholesky(), "curvature": MonteCarloFisher()},
        {"structure": lambda layer: __import__("natgrad").EKFAC()},
    ],
    ids=["spectral", "drawn", "ekfac"],
)
def test_whatever_the_settings(settings):
    model = frozen_net()
    kfac = started(model, **settings)
    unfreeze(model)
    plain = step(model, kfac)
    assert [block.ready for block in kfac.blocks] == [True] * 3
    for name, p in model.named_parameters():
        assert not torch.allclose(p.grad, plain[name])


class TestOptimizers:
    def test_a_layer_in_no_group_is_told_of(self):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, update_every=1)
        step(model, kfac)
        model[4] = nn.Linear(8, 3)
        told = "'4.weight' and 1 others are trained, and in no group of the optimizer"
        with pytest.warns(UserWarning, match=told):
            step(model, kfac)

    def test_an_optimizer_of_nothing_that_is_there_is_refused(self):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, update_every=1)
        step(model, kfac)
        load_by_assignment(model)
        with pytest.raises(SettingError, match="has none of the parameters of Sequential"):
            step(model, kfac)

    @pytest.mark.filterwarnings("error")
    def test_attached(self):
        """Gradual unfreezing, from the head down, in a loop that knows nothing of K-FAC."""
        model = net()
        for layer in (0, 2):
            model[layer].requires_grad_(False)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        kfac = KFAC(model, optimizer).attach()
        losses = []
        for index in range(24):
            if index in (8, 16):
                model[{8: 2, 16: 0}[index]].requires_grad_(True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert [block.ready for block in kfac.blocks] == [True] * 3
        assert losses[-1] < losses[7] < losses[0]

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("changed_at", [4, 5])
    def test_natural_muon_steps_what_the_model_has_now(self, changed_at):
        """Whether the step updates (4) or not: what it has preconditioned is stepped as that, once,
        and new layers follow, norm layers by AdamW."""
        model = frozen_net()
        optimizer = NaturalMuon(model, lr=0.02, update_every=4, refresh_every=4)
        for index in range(12):
            if index == changed_at:
                unfreeze(model)
                model[4] = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            now = {n: p.detach() for n, p in model.named_parameters()}
            moved = {n: float((p - before[n]).square().mean().sqrt()) for n, p in now.items()}
            assert (moved["2.weight"] > 0) == (index >= changed_at)
            assert moved["0.weight"] == pytest.approx(0.02, rel=0.2)
        assert [block.name for block in optimizer.kfac.blocks] == ["0", "2", "4.1"]
        assert "exp_avg" in optimizer.state[model[4][0].weight]
        (group,) = optimizer.param_groups
        assert group["params"] == list(model.parameters())  # as one that is made now has them
        assert set(optimizer.state) == {p for p in model.parameters() if p in optimizer.state}


class Odd(nn.Module):
    """No matrix times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return (x[..., None] * self.rates).sin().sum(-2)


class TestWithoutBlock:
    def test_a_pruned_weight_is_told_of(self):
        model = net()
        kfac = started(model)
        prune.l1_unstructured(model[2], "weight", 0.5)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            plain = step(model, kfac)
        (said,) = {str(one.message) for one in told}
        assert re.search("'2.weight_orig' keeps its plain gradient, since it was pruned or", said)
        assert torch.equal(model[2].weight_orig.grad, plain["2.weight_orig"])
        with warnings.catch_warnings():  # it is said once
            warnings.simplefilter("error")
            step(model, kfac)

    @pytest.mark.filterwarnings("error")
    def test_what_the_user_has_excluded_stays_so(self):
        model = frozen_net()
        kfac = KFAC(model, kl_clip=None, update_every=1, exclude=["[25]"])
        step(model, kfac)
        team = kfac.team
        unfreeze(model)
        model.append(nn.Linear(3, 3))
        plain = step(model, kfac)
        assert kfac.team is team
        assert torch.equal(model[2].weight.grad, plain["2.weight"])
        assert kfac.coverage().uncovered["5.bias"] == "excluded"

    def test_a_model_without_any_layer_is_refused(self):
        model = nn.Sequential(nn.Linear(5, 3))
        kfac = started(model)
        model[0] = Odd()
        with pytest.raises(CoverageError, match="has no layer any more that KFAC can precondition"):
            step(model, kfac)


def test_blocks_follow_without_any_update_to_come():
    """A removed layer takes its block along."""
    model = net()
    kfac = started(model)
    model[2] = nn.Identity()
    step(model, kfac)
    assert [block.name for block in kfac.blocks] == ["0", "4"]
    assert set(kfac.state_dict()["blocks"]) == {"0", "4"}


def test_compiled_modules_that_come_while_all_run_eagerly():
    """On steps that update, modules run without their compiled code, also new ones."""
    model = nn.Sequential(nn.Linear(2, 2))
    codes = [lambda *args: None, lambda *args: None]
    model[0]._compiled_call_impl = codes[0]
    compiled = Compiled(model)
    compiled.run_eagerly(True)
    model.append(nn.Linear(2, 2))
    model[1]._compiled_call_impl = codes[1]
    compiled.follow()
    assert compiled.found
    assert [module._compiled_call_impl for module in model] == [None, None]
    compiled.run_eagerly(False)
    assert [module._compiled_call_impl for module in model] == codes


def test_many_ranks_that_have_changed_alike_agree():
    """Squares of sums of a thousand digests have more digits than a float."""
    team = object.__new__(Team)
    team.size, team.rank = 1000, 0
    for digest in range(1, DIGEST, 9973):
        team.agreed, team.digest = False, float(digest)
        team.settle(1000.0 * digest, 1000.0 * digest**2)
        assert team.agreed
    one_else = 999 * digest + 1
    with pytest.raises(SettingError, match="not on all ranks alike"):
        team.settle(float(one_else), 999.0 * digest**2 + 1)


def test_a_stack_goes_on_without_a_block_that_sleeps():
    """Its others would be preconditioned one by one otherwise, with all roots made anew."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    kfac = started(model)
    found = []
    for trained in (False, True):
        model[0].requires_grad_(trained)
        step(model, kfac)
        found.append(
            [[block.name for block in stack.blocks] for stack in kfac.preconditioning.stacks]
        )
    assert found == [[["1", "2"]], [["0", "1", "2"]]]
