"""A run that is resumed from a checkpoint is the run that was never interrupted, bit by bit."""

import copy
import io
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.testing import assert_close

import natgrad
from natgrad import KFAC
from natgrad.errors import CheckpointError
from natgrad.lab import schemes
from training_loops import CHOICES, MLP, NETS, Net, assert_equal, often, train, weights

LATE = [pytest.param(n, id=f"after-{n}") for n in (2, 5)]


def through_a_file(state):
    """Saved, and loaded as plain tensors, numbers and strings."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def make(net: Net, **settings):
    model = net.model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, KFAC(model, optimizer, **{**often(), **settings})


def steps(net, model, optimizer, kfac, seeds):
    """Train on the batches of these seeds, adapting the damping where that is asked for."""
    for seed in seeds:
        x, y = net.batch(seed=seed)
        (before,) = train(model, optimizer, kfac, [(x, y)])
        if isinstance(kfac.settings.damping, natgrad.schedules.LevenbergMarquardt):
            with torch.no_grad():
                after = torch.nn.functional.cross_entropy(model(x), y)
            kfac.adapt(before, after)


def resumes(net: Net, interrupted_after: int, total: int = 9, **settings) -> KFAC:
    """Check that a resumed run has the weights of one that went through."""
    whole = make(net, **settings)
    steps(net, *whole, range(total))

    model, optimizer, kfac = first = make(net, **settings)
    steps(net, *first, range(interrupted_after))
    saved = through_a_file(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "kfac": kfac.state_dict(),
        }
    )
    # A process of its own begins with other weights and has trained on something else.
    model, optimizer, kfac = second = make(net, **settings)
    steps(net, *second, [50])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    kfac.load_state_dict(saved["kfac"])
    assert_equal(kfac.state_dict(), saved["kfac"])
    steps(net, *second, range(interrupted_after, total))

    assert_equal(weights(model), weights(whole[0]))
    assert_equal(kfac.state_dict(), whole[2].state_dict())
    return kfac


def shared_inputs(kfac):
    """By block: the one whose input factors it shares."""
    others = {block.name: block.shares_input_with for block in kfac.blocks}
    return {name: None if other is None else other.name for name, other in others.items()}


class TestResumedRun:
    @pytest.mark.parametrize("late", LATE)
    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_every_structure_and_inverse(self, structure, inverse, late):
        """In the middle of an update interval, and of a refresh interval."""
        resumes(
            NETS["cnn"],
            late,
            structure=structure,
            inverse=inverse,
            update_every=3,
            refresh_every=4,
        )

    @pytest.mark.parametrize("late", LATE)
    @pytest.mark.parametrize("net", NETS)
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
    def test_every_network(self, net, dtype, late):
        resumes(NETS[net], late, update_every=2, refresh_every=3, factor_dtype=dtype)

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_bfloat16_factors(self, structure, inverse):
        resumes(MLP, 4, structure=structure, inverse=inverse, factor_dtype=torch.bfloat16)

    @pytest.mark.parametrize("late", LATE)
    @pytest.mark.parametrize(
        "settings",
        [
            {"refresh_every": natgrad.schedules.Drift(0.05)},
            {"refresh_every": natgrad.schedules.Drift(10.0, at_most=3)},
            {"refresh_every": {"A": natgrad.schedules.Drift(0.05), "G": 2}},
            {"curvature": natgrad.MonteCarloFisher(samples=2, seed=3)},
            {"curvature": natgrad.ExactFisher()},
            {"update_every": lambda t: 1 if t < 3 else 3, "refresh_every": lambda t: 2},
            {"update_every": {"A": 2, "G": 3}, "refresh_every": {"A": 5, "G": 4}},
            {"update_every": {"A": lambda t: 2, "G": 3}, "refresh_every": lambda t: 1 + t // 2},
            {"damping": natgrad.schedules.LevenbergMarquardt(start=1e-2, every=2)},
            {"damping": lambda t: 1e-2 / (1 + t), "factor_decay": lambda t: t / (1 + t)},
            {"loss": natgrad.MeanLoss(terms_per_sample=1.2), "norm_damping": 3.0},
        ],
        ids=lambda settings: "-".join(settings),
    )
    def test_every_setting_that_has_a_state(self, settings, late):
        resumes(MLP, late, **settings)

    def test_layers_on_one_input_still_know_each_other(self):
        kfac = resumes(NETS["attention"], 3, update_every=2, refresh_every=3)
        twins = shared_inputs(kfac)
        assert len({twins[f"attention.{role}"] for role in ("query", "key", "value")} - {None}) == 1
        again = make(NETS["attention"])[2]
        again.load_state_dict(kfac.state_dict())
        assert twins == shared_inputs(again)

    def test_after_a_dropped_batch_and_a_failed_decomposition(self, monkeypatch):
        model, optimizer, kfac = make(MLP)
        steps(MLP, model, optimizer, kfac, range(2))
        x, y = MLP.batch()
        train(model, optimizer, kfac, [(x * float("nan"), y)])
        kfac.blocks[0].failures = 2
        other = make(MLP)[2]
        other.load_state_dict(through_a_file(kfac.state_dict()))
        assert other.preconditioning.zeroed == 1
        assert [int(block.dropped) for block in other.blocks] == [1, 1, 1]
        assert other.blocks[0].failures == 2

    def test_before_the_first_step(self):
        resumes(MLP, 0)

    def test_the_state_is_a_copy(self):
        model, optimizer, kfac = make(MLP)
        steps(MLP, model, optimizer, kfac, range(2))
        state = kfac.state_dict()
        kept = copy.deepcopy(state)
        steps(MLP, model, optimizer, kfac, range(2, 4))
        assert_equal(state, kept)
        kfac.load_state_dict(state)
        steps(MLP, model, optimizer, kfac, range(2, 4))
        assert_equal(state, kept)

    def test_the_state_is_plain(self):
        model, optimizer, kfac = make(NETS["attention"], curvature=natgrad.MonteCarloFisher())
        steps(NETS["attention"], model, optimizer, kfac, range(2))

        def plain(value):
            if isinstance(value, dict):
                return all(type(key) is str and plain(item) for key, item in value.items())
            if isinstance(value, list):
                return all(map(plain, value))
            return value is None or type(value) in (int, float, str, torch.Tensor)

        assert plain(kfac.state_dict())


def at(state, *path):
    for key in path:
        state = state[key]
    return state


def without(*path):
    def damage(state):
        del at(state, *path[:-1])[path[-1]]
        return state

    return damage


def with_value(value, *path):
    def damage(state):
        at(state, *path[:-1])[path[-1]] = value
        return state

    return damage


TENSOR = torch.zeros(3)
DAMAGED = [
    (lambda state: [1, 2], "The state is a list but must be what KFAC.state_dict"),
    (lambda state: None, "The state is a NoneType"),
    (
        lambda state: {},
        "The state has no adapted_damping, blocks, generator, moments, refresh",
    ),
    (without("steps"), "The state has no steps"),
    (without("blocks"), "The state has no blocks"),
    (without("version"), "The state has no version"),
    (with_value(99, "version"), r"has version 99, and this natgrad reads \d+. Load it"),
    (with_value(-1, "steps"), "The state has -1 for steps"),
    (with_value("3", "zeroed"), "The state has '3' for zeroed"),
    (with_value(float("nan"), "adapted_damping"), "The state has nan for adapted_damping"),
    (with_value(None, "adapted_damping"), "The state has None for adapted_damping"),
    (with_value(3, "update_clocks"), "The state of update_clocks is a int and not a mapping"),
    (without("update_clocks", "A"), "The state of update_clocks has no A"),
    (without("refresh_clocks", "G", "last"), "refresh_clocks has no last step for G"),
    (with_value(TENSOR, "generator"), "The state of the generator is not one"),
    (with_value("seed", "generator"), "The state of the generator is not one"),
    (with_value([], "blocks"), "The state has list for blocks"),
    (without("blocks", "2"), "The state is of another model: the state has no '2'. Build the same"),
    (with_value({}, "blocks", "9"), "The state is of another model: the model has no '9'"),
    (with_value(TENSOR, "blocks", "2"), "The state of block '2' is a Tensor and not a mapping"),
    (without("blocks", "2", "shape"), "The state of block '2' has no shape"),
    (
        with_value([1, 9, 9], "blocks", "2", "shape"),
        r"block '2' has shape \[1, 9, 9\], but KFAC has",
    ),
    (without("blocks", "2", "factors"), "The state of block '2' has no factors"),
    (without("blocks", "2", "factors", "A"), "block '2', among factors, has no A"),
    (without("blocks", "2", "factors", "A", "mean"), "block '2', factor A, has no mean"),
    (with_value(1, "blocks", "2", "factors", "A", "mean"), "factor A, mean is 1 and no tensor"),
    (
        with_value(TENSOR, "blocks", "2", "factors", "A", "mean"),
        r"mean has shape \(3,\) but \(\d+,\)",
    ),
    (
        with_value(TENSOR, "blocks", "2", "factors", "A", "weight"),
        r"weight has shape \(3,\) but \(\)",
    ),
    (
        with_value(TENSOR, "blocks", "2", "factors", "A", "change"),
        r"change has shape \(3,\) but \(\)",
    ),
    (with_value({}, "blocks", "2", "factors", "X"), "block '2' has an unknown factor 'X'"),
    (without("blocks", "2", "parts"), "The state of block '2' has no parts"),
    (without("blocks", "2", "parts", "G"), "block '2', among parts, has no G"),
    (with_value([], "blocks", "2", "parts", "X"), "block '2' has an unknown part 'X'"),
    (with_value([], "blocks", "2", "parts", "A"), "has not the 2 tensors of the inverse of A"),
    (with_value(None, "blocks", "2", "parts", "A"), "has not the 2 tensors of the inverse of A"),
    (with_value([1, 2], "blocks", "2", "parts", "A"), "inverse of A, is 1 and no tensor"),
    (
        with_value([TENSOR, TENSOR], "blocks", "2", "parts", "A"),
        r"inverse of A, has shape \(3,\) but \(1, 7, 7\) is needed: it is of another model, or",
    ),
    (without("blocks", "2", "saved"), "The state of block '2' has no saved"),
    (without("blocks", "2", "saved", "parts"), "block '2', under saved, has no parts"),
    (with_value("9", "blocks", "2", "shares_input_with"), "block '2' shares its input with '9'"),
    (with_value("2", "blocks", "2", "shares_input_with"), "block '2' shares its input with '2'"),
    (without("blocks", "2", "shares_input_with"), "state of block '2' has no shares_input_with"),
    (
        with_value(torch.tensor(float("nan")), "blocks", "2", "factors", "A", "change"),
        "factor A, change has numbers that are not finite",
    ),
    (
        with_value(torch.tensor(1e300).double() * 1e300, "blocks", "2", "factors", "A", "weight"),
        "factor A, weight has numbers that are not finite",
    ),
    (
        with_value(
            torch.tensor(1e200, dtype=torch.float64), "blocks", "2", "factors", "A", "weight"
        ),
        r"A, weight has numbers as large as 1e\+200, which torch.float32 does not have: make KF",
    ),
    (with_value(-1, "blocks", "2", "dropped"), "block '2' has -1 for dropped"),
    (with_value(1.5, "blocks", "2", "failures"), "block '2' has 1.5 for failures"),
]


def refused(kfac, state, message):
    """Refused with this message, and nothing has changed."""
    before = copy.deepcopy(kfac.state_dict())
    with pytest.raises(CheckpointError, match=message):
        kfac.load_state_dict(state)
    assert_equal(kfac.state_dict(), before)


class TestRefused:
    @pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=[m[:40] for _, m in DAMAGED])
    def test_a_damaged_state(self, damage, message):
        model, optimizer, kfac = make(MLP)
        steps(MLP, model, optimizer, kfac, range(2))
        state = copy.deepcopy(kfac.state_dict())
        steps(MLP, model, optimizer, kfac, range(2, 4))
        refused(kfac, damage(state), message)

    def test_another_model(self):
        state = make(NETS["twice"])[2].state_dict()
        model, optimizer, kfac = make(MLP)
        steps(MLP, model, optimizer, kfac, range(2))
        refused(kfac, state, "another model: the model has no 'first', 'last', 'shared'; the state")

    def test_another_width(self):
        def narrow():
            return torch.nn.Sequential(*MLP.build()[:2], torch.nn.Linear(6, 4))

        state = make(Net(narrow, MLP.sample))[2].state_dict()
        model = torch.nn.Sequential(*MLP.build()[:3])
        kfac = KFAC(model, kl_clip=None)
        refused(
            kfac, state, r"block '2' has shape \[1, 4, 7\], but KFAC has \[1, 5, 7\]. Make KFAC"
        )

    def test_another_selection(self):
        state = make(MLP, exclude=["0"])[2].state_dict()
        refused(
            make(MLP)[2], state, "the state has no '0'. Build the same model, with the same incl"
        )

    def test_another_structure(self):
        state = make(MLP, structure=natgrad.EKFAC())[2].state_dict()
        refused(
            make(MLP)[2], state, r"block '0' has structure 'EKFAC\(\)', but KFAC has .Kronecker"
        )

    def test_another_inverse(self):
        state = make(MLP, inverse=natgrad.Cholesky())[2].state_dict()
        refused(
            make(MLP)[2], state, r"'0' has inverse 'Cholesky\(\)', but KFAC has 'Eigen\(\)'. Make"
        )

    def test_another_damping_rule(self):
        state = make(MLP)[2].state_dict()
        kfac = make(MLP, damping=natgrad.schedules.LevenbergMarquardt())[2]
        refused(kfac, state, "no adapted damping, so it was not saved with LevenbergMarquardt, but")

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    @pytest.mark.parametrize("net", ["cnn", "tied"])
    def test_parts_of_another_shape(self, net, structure, inverse):
        model, optimizer, kfac = make(NETS[net], structure=structure, inverse=inverse)
        steps(NETS[net], model, optimizer, kfac, range(2))
        for block in kfac.blocks:
            for name, parts in block.parts.items():
                for index in range(len(parts)):
                    state = copy.deepcopy(kfac.state_dict())
                    saved = state["blocks"][block.name]["parts"][name]
                    saved[index] = saved[index].new_zeros(*saved[index].shape, 2)
                    refused(kfac, state, f"block '{block.name}', inverse of {name}, has shape")


class TestBeside:
    """What is saved in one folder with the preconditioner."""

    RULES: ClassVar[dict] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "lamb": lambda p: schemes.LAMB(p, lr=0.1),
    }

    def made(self, rule, steps):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = self.RULES[rule](model.parameters())
        kfac = KFAC(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            kfac.step()
            optimizer.step()
        return kfac, {"model": model, "optimizer": optimizer}

    @pytest.mark.parametrize("rule", list(RULES))
    def test_an_optimizer_that_has_not_stepped_yet(self, rule, tmp_path):
        kfac, beside = self.made(rule, 3)
        kfac.save(tmp_path / "saved", beside)
        other, found = self.made(rule, 0)
        other.load(tmp_path / "saved", found)
        expected = beside["optimizer"].state_dict()
        loaded = found["optimizer"].state_dict()
        assert loaded["param_groups"] == expected["param_groups"]
        assert loaded["state"].keys() == expected["state"].keys() == {0, 1}
        for index, state in expected["state"].items():
            assert state.keys() == loaded["state"][index].keys()
            for name, value in state.items():
                assert_close(torch.as_tensor(loaded["state"][index][name]), torch.as_tensor(value))
        assert all(p.grad is None for p in found["model"].parameters())

    @pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
    def test_weights_stay_when_only_the_optimizer_is_loaded(self, lr, tmp_path):
        """Weight decay would move them even without a gradient."""
        kfac, beside = self.made("adamw", 3)
        kfac.save(tmp_path / "saved", {"optimizer": beside["optimizer"]})
        other, found = self.made("adamw", 0)
        found["optimizer"].param_groups[0].update(lr=lr, weight_decay=0.5)
        before = [p.clone() for p in found["model"].parameters()]
        other.load(tmp_path / "saved", {"optimizer": found["optimizer"]})
        for p, own in zip(found["model"].parameters(), before, strict=True):
            assert torch.equal(p, own)
        assert len(found["optimizer"].state) == 2

    def test_one_that_had_not_stepped_when_it_was_saved(self, tmp_path):
        kfac, beside = self.made("adamw", 0)
        kfac.save(tmp_path / "saved", beside)
        other, found = self.made("adamw", 0)
        other.load(tmp_path / "saved", found)
        assert not found["optimizer"].state

    def test_a_checkpoint_that_does_not_fit_wakes_nothing(self, tmp_path):
        kfac, beside = self.made("sgd", 3)
        kfac.save(tmp_path / "saved", beside)
        other, found = self.made("sgd", 0)
        with pytest.raises(CheckpointError):
            other.load(tmp_path / "saved", {**found, "missing": torch.zeros(1)})
        assert not found["optimizer"].state
        assert found["optimizer"].param_groups[0]["lr"] == 0.1
