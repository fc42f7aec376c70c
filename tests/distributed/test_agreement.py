"""Ranks that were given different things say so, all of them; what goes wrong on one of them during
training goes no further."""

import warnings
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from distributed.resuming import Training, run
from distributed.training import batch
from kfac_keywords import grouped
from natgrad import KFAC, Distributed, NatgradError
from natgrad.errors import CaptureError, SettingError
from training_loops import assert_equal


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


class Odd(nn.Module):
    """A weight that no layer stands for: bare, with a block of its own, or in a list, without."""

    def __init__(self, size, listed=False):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        scale = nn.Parameter(torch.ones(size))
        self.scale = nn.ParameterList([scale]) if listed else scale


MODELS = {
    "wide": lambda: layers(4, 5, 3),
    "narrow": lambda: layers(4, 6, 3),
    "deep": lambda: layers(4, 5, 3, 3),
    "in order": lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}),
    "turned": lambda: nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)}),
    "odd": lambda: Odd(3),
    "odder": lambda: Odd(4),
    "listed": lambda: Odd(3, listed=True),
    "longer": lambda: Odd(4, listed=True),
    "double": lambda: layers(4, 5, 3).double(),
    "frozen": lambda: layers(4, 5, 3).requires_grad_(False),
}


def made(choices, ranks_with_other):
    """What a rank that is given ``choices[1]``, if it is one of them, or ``choices[0]`` raises."""
    import torch.distributed as dist

    rank = dist.get_rank()
    name, settings = choices[rank in ranks_with_other]
    model = MODELS[name]()
    settings = {"kl_clip": None, **settings}
    try:
        kfac = KFAC(model, **grouped(**settings))
    except NatgradError as error:
        return type(error).__name__, str(error)
    return "made", kfac.plan.strategy


def told(world, one, other, ranks=3, odd=(1,)):
    """The one sentence of all ranks."""
    found = world.run(made, (one, other), odd, ranks=ranks, timeout=30)
    assert len(set(found)) == 1
    kind, text = found[0]
    assert kind == "SettingError"
    return text


SAME = "Build the same model and pass the same settings to KFAC on every rank."


class TestDifferentModels:
    @pytest.mark.parametrize(
        ("one", "other", "difference"),
        [
            (
                "wide",
                "narrow",
                "block '0': Linear 5 x 5 with Kronecker(sharing='expand'), Eigen(), torch.float32 "
                "on rank 0, Linear 6 x 5 with Kronecker(sharing='expand'), Eigen(), torch.float32 "
                "on rank 1",
            ),
            (
                "wide",
                "deep",
                "the order of blocks: 0, 1 on rank 0, 0, 1, 2 on rank 1",
            ),
            (
                "deep",
                "wide",
                "block '2': Linear 3 x 4 with Kronecker(sharing='expand'), Eigen(), torch.float32 "
                "on rank 0, missing on rank 1",
            ),
            ("in order", "turned", "the order of blocks: a, b on rank 0, b, a on rank 1"),
            (
                "odd",
                "odder",
                "block 'scale': Odd 3 x 1 with Diagonal(), Eigen(), torch.float32 on rank 0, Odd "
                "4 x 1 with Diagonal(), Eigen(), torch.float32 on rank 1",
            ),
            (
                "listed",
                "longer",
                "parameter 'scale.0': (3,) of torch.float32 on rank 0, (4,) of torch.float32 on "
                "rank 1",
            ),
        ],
    )
    def test_are_named(self, world, one, other, difference):
        text = told(world, (one, {}), (other, {}))
        assert text == f"Ranks 0 and 1 differ in {difference}. {SAME}"

    def test_another_dtype(self, world):
        text = told(world, ("wide", {}), ("double", {}))
        assert text.startswith("Ranks 0 and 1 differ in block '0': Linear 5 x 5 with Kronecker(")
        assert "torch.float32 on rank 0" in text
        assert "torch.float64 on rank 1" in text


class TestDifferentSettings:
    @pytest.mark.parametrize(
        ("one", "other", "difference"),
        [
            ({}, {"damping": 0.1}, "damping: None on rank 0, 0.1 on rank 1"),
            ({"factor_decay": 0.5}, {}, "factor_decay: 0.5 on rank 0, 0.95 on rank 1"),
            (
                {},
                {"update_every": 7},
                "update_every: Doubling(at_most=10) on rank 0, 7 on rank 1",
            ),
            (
                {"refresh_every": {"A": 3, "G": 4}},
                {"refresh_every": 3},
                "refresh_every: A: 3, G: 4 on rank 0, 3 on rank 1",
            ),
            (
                {},
                {"curvature": natgrad.MonteCarloFisher()},
                "curvature: EmpiricalFisher() on rank 0, MonteCarloFisher(samples=1, seed=0, "
                "likelihood=Categorical(class_axis=1, ignore_index=-100)) on rank 1",
            ),
            (
                {"placement": natgrad.MemOpt()},
                {"placement": natgrad.CommOpt()},
                "placement: MemOpt() on rank 0, CommOpt() on rank 1",
            ),
            (
                {},
                {"packed": False},
                "packed: True on rank 0, False on rank 1",
            ),
            (
                {"wire_dtype": torch.bfloat16},
                {},
                "wire_dtype: torch.bfloat16 on rank 0, None on rank 1",
            ),
            (
                {"wire_dtype": torch.bfloat16},
                {"wire_dtype": natgrad.comm.float21},
                "wire_dtype: torch.bfloat16 on rank 0, natgrad.comm.float21 on rank 1",
            ),
            (
                {"inverse_dtype": natgrad.comm.float21},
                {},
                "inverse_dtype: natgrad.comm.float21 on rank 0, torch.float32 on rank 1",
            ),
            (
                {"gradient_dtype": natgrad.comm.float21},
                {"gradient_dtype": torch.bfloat16},
                "gradient_dtype: natgrad.comm.float21 on rank 0, torch.bfloat16 on rank 1",
            ),
            (
                {"reduction": "sum"},
                {},
                "loss: SumLoss(terms_per_sample=1, batch_axis=0) on rank 0, "
                "MeanLoss(terms_per_sample=1, regions=None, batch_axis=0) on rank 1",
            ),
        ],
    )
    def test_are_named(self, world, one, other, difference):
        text = told(world, ("wide", one), ("wide", other))
        assert text == f"Ranks 0 and 1 differ in {difference}. {SAME}"

    def test_of_inverse(self, world):
        text = told(world, ("wide", {}), ("wide", {"inverse": natgrad.Cholesky()}), odd=(2,))
        assert "Eigen(), torch.float32 on rank 0" in text
        assert "Cholesky(), torch.float32 on rank 2" in text

    def test_ddp_on_one_rank_only(self, world):
        for text in world.run(wrapped_on_one_rank, ranks=2, timeout=30):
            assert text == (
                "Ranks 0 and 1 differ in who adds up gradients: DDP or FSDP on rank 0, K-FAC on "
                f"rank 1. {SAME}"
            )

    def test_functions_are_told_apart_by_name_alone(self, world):
        found = world.run(
            made, (("wide", {"damping": half}), ("wide", {"damping": half})), (1,), ranks=2
        )
        assert [kind for kind, _ in found] == ["made", "made"]
        text = told(world, ("wide", {"damping": half}), ("wide", {"damping": third}), ranks=2)
        assert "damping: the function half on rank 0, the function third on rank 1" in text


def half(step):
    return 0.5


def third(step):
    return 1 / 3


def wrapped_on_one_rank():
    """A frequent mistake is to pass what is inside of DDP."""
    import torch.distributed as dist

    ddp = nn.parallel.DistributedDataParallel(MODELS["wide"]())
    with pytest.raises(SettingError) as error:
        KFAC(ddp.module if dist.get_rank() else ddp, kl_clip=None)
    return str(error.value)


class TestFailedOnOneRank:
    """The rank itself raises its own error, all others say which rank it was."""

    @pytest.mark.parametrize(
        ("other", "kind", "sentence"),
        [
            (
                ("wide", {"exclude": ["head*"]}),
                "CoverageError",
                "exclude has 'head*', which matches no module of Sequential. Names are those of",
            ),
            (("wide", {"damping": -1.0}), "SettingError", "damping is -1.0 but must be"),
            (("wide", {"structure": natgrad.EKFAC}), "SettingError", "structure is <class 'natg"),
            (
                ("wide", {"distributed": 3}),
                "SettingError",
                "distributed is 3 but must be a natgrad",
            ),
            (("frozen", {}), "CoverageError", ""),
            (
                ("wide", {"placement": natgrad.Hybrid(0.75)}),
                "SettingError",
                "Hybrid.fraction is 0.75, which lets 2 of 3 ranks precondition a block, but that "
                "number must divide 3: pass one of 1/3, 1.",
            ),
        ],
        ids=["exclude", "damping", "structure", "distributed", "frozen", "placement"],
    )
    @pytest.mark.parametrize("odd", [0, 2])
    def test_is_said_by_all(self, world, other, kind, sentence, odd):
        found = world.run(made, (("wide", {}), other), (odd,), ranks=3, timeout=30)
        own = found.pop(odd)
        assert own[0] == kind
        assert sentence in own[1]
        for answer in found:
            assert answer == ("SettingError", f"KFAC could not be made on rank {odd}: {own[1]}")

    def test_a_fraction_that_does_not_fit_the_ranks(self, world):
        settings = {"placement": natgrad.Hybrid(0.75)}
        text = told(world, ("wide", settings), ("wide", settings))
        assert text == (
            "Hybrid.fraction is 0.75, which lets 2 of 3 ranks precondition a block, but that "
            "number must divide 3: pass one of 1/3, 1."
        )

    def test_an_error_that_is_not_ours(self, world):
        own, other = world.run(odd_placement, ranks=2, timeout=30)
        assert own == ("ZeroDivisionError", "one plan too many")
        assert other == ("SettingError", "KFAC could not be made on rank 0: one plan too many")


def odd_placement():
    import torch.distributed as dist

    def placement(blocks, cluster):
        raise ZeroDivisionError("one plan too many")

    strategy = natgrad.MemOpt() if dist.get_rank() else placement
    with pytest.raises(Exception, match="one plan too many") as error:
        KFAC(MODELS["wide"](), kl_clip=None, distributed=Distributed(strategy))
    return type(error.value).__name__, str(error.value)


class TestGroup:
    def test_that_is_no_more(self, world):
        for text in world.run(destroyed, ranks=2):
            assert text == (
                "ProcessGroups() needs torch.distributed, which is not initialised here: call "
                "torch.distributed.init_process_group() first, or use Alone() for one process."
            )

    def test_of_some_ranks(self, world):
        assert world.run(in_halves, ranks=4) == [2, 2, 2, 2]


def destroyed():
    import torch.distributed as dist

    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(SettingError) as error:
        KFAC(MODELS["wide"](), kl_clip=None, distributed=Distributed(group=group))
    return str(error.value)


def in_halves():
    """Ranks of different groups may have different models."""
    import torch.distributed as dist

    low = dist.get_rank() < 2
    groups = [dist.new_group(half) for half in ([0, 1], [2, 3])]
    half = Distributed(group=groups[not low])
    kfac = KFAC(MODELS["wide" if low else "deep"](), kl_clip=None, distributed=half)
    return kfac.plan.world_size


def without_gradient(layout, placement, at, settings):
    """One rank loses a gradient at a step."""
    import torch.distributed as dist

    training = Training.here(run(layout, placement=placement, **settings)).steps(0, at)
    x, y = batch("mlp", at, 4)
    F.cross_entropy(training.model(x), y).backward()
    if dist.get_rank() == 1:
        dict(training.parameters())["2.weight"].grad = None
    with pytest.raises(CaptureError) as error:
        training.kfac.step()
    return str(error.value)


class TestMissingGradient:
    @pytest.mark.parametrize(
        ("layout", "placement", "at"),
        [
            ("plain", natgrad.MemOpt(), 0),  # an update
            ("plain", natgrad.MemOpt(), 1),  # neither an update nor a refresh
            ("plain", natgrad.CommOpt(), 1),
            ("plain", natgrad.ReduceScatter(), 1),
            ("ddp", natgrad.MemOpt(), 1),
            ("ddp", natgrad.CommOpt(), 2),  # nothing travels but at updates
            ("fsdp", natgrad.MemOpt(), 1),
        ],
        ids=str,
    )
    def test_is_named_on_all_ranks(self, world, layout, placement, at):
        found = world.run(without_gradient, layout, placement, at, {}, ranks=3, timeout=30)
        for rank, text in enumerate(found):
            here = "has none" if rank == 1 else "has one"
            assert text == (
                f"Linear '2' has a gradient on 2 of 3 ranks only (rank {rank} {here}): use every "
                "layer on every rank, or leave it out on all of them."
            )


def poisoned(layout, placement, what, method):
    """One rank has NaN in one step; all others are good. The weights before it, before that, after
    it, and at the end."""
    training = Training.here(run(layout, update_every=1, refresh_every=1, **placement, **method))
    history = [training.steps(0, 1).weights(), training.steps(1, 2).weights()]
    training.optimizer.zero_grad()
    x, y = batch("mlp", 2, 4)
    bad = training.rank == 1
    if bad and what == "input":
        x = x.clone()
        x[0, 0] = float("nan")
    loss = F.cross_entropy(training.model(x), y)
    if bad and what == "loss":
        loss = loss * float("nan")
    loss.backward()
    if bad and what == "gradient":
        for p in training.model.parameters():
            p.grad.mul_(float("nan"))
    training.kfac.step()
    training.optimizer.step()
    history += [training.weights(), training.steps(3, 5).weights()]
    dropped = {block.name: int(block.dropped) for block in training.kfac.blocks}
    return history, dropped, training.kfac.preconditioning.zeroed, training.kfac.state_dict()


PLACED = {
    "mem": {"placement": natgrad.MemOpt()},
    "comm": {"placement": natgrad.CommOpt()},
    "scatter": {"placement": natgrad.ReduceScatter()},
}


POISONED = [
    *((layout, what) for layout in ("plain", "ddp", "fsdp") for what in ("input", "loss")),
    # DDP's gradients are the same everywhere.
    ("plain", "gradient"),
    ("fsdp", "gradient"),
]
METHODS = {"kfac": {}, "ekfac": {"structure": natgrad.EKFAC()}}


def placed_methods(layout, what):
    """Each placement with one method, and in another layout or with another poison the other."""
    turn = (layout != "plain") + (what == "loss")
    return [(name, list(METHODS)[(i + turn) % 2]) for i, name in enumerate(PLACED)]


class TestNaN:
    def test_every_placement_meets_every_method(self):
        """In each layout, and with each poison."""
        for value in ("plain", "ddp", "fsdp", "input", "loss", "gradient"):
            found = {pair for one in POISONED if value in one for pair in placed_methods(*one)}
            assert found == set(product(PLACED, METHODS)), value

    @pytest.mark.parametrize(("layout", "what"), POISONED)
    def test_on_one_rank(self, world, layout, what):
        """The step does not happen anywhere, and training goes on."""
        calls = {
            (placement, method): (layout, PLACED[placement], what, METHODS[method])
            for placement, method in placed_methods(layout, what)
        }
        for key, found in world.each(poisoned, calls, ranks=3).items():
            (earlier, before, after, end), dropped, zeroed, state = found[0]
            for other in found[1:]:
                assert_equal(list(other), list(found[0]), str(key))
            assert zeroed == 1, key
            assert set(dropped.values()) == ({0} if what == "gradient" else {1}), key
            assert state["steps"] == 5, key
            for name, weight in before.items():
                # All that moves is the optimizer's momentum.
                torch.testing.assert_close(after[name] - weight, 0.9 * (weight - earlier[name]))
                assert torch.isfinite(end[name]).all(), (key, name)
                assert not torch.equal(end[name], after[name]), (key, name)


def undecomposed(layout, placement, inverse):
    """``torch.linalg`` fails on one rank during one step."""
    training = Training.here(
        run(layout, update_every=1, refresh_every=1, inverse=inverse, **placement)
    ).steps(0, 2)
    originals = torch.linalg.eigh, torch.linalg.cholesky_ex, torch.linalg.cholesky

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("no")

    if training.rank == 1:
        torch.linalg.eigh = torch.linalg.cholesky_ex = torch.linalg.cholesky = fail
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training.steps(2, 3)
    torch.linalg.eigh, torch.linalg.cholesky_ex, torch.linalg.cholesky = originals
    training.steps(3, 5)
    failures = {block.name: block.failures for block in training.kfac.blocks}
    sentences = sorted(str(w.message) for w in said)
    return training.weights(), failures, sentences, training.kfac.state_dict()


class TestFailedDecomposition:
    @pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
    def test_on_one_rank(self, world, layout):
        """The last good inverse stays everywhere."""
        calls = {
            f"{placement}, {inverse}": (layout, PLACED[placement], inverse)
            for placement in PLACED
            for inverse in (natgrad.Eigen(), natgrad.Cholesky())
        }
        for key, found in world.each(undecomposed, calls, ranks=3).items():
            weights, failures, sentences, _ = found[0]
            for other in found[1:]:
                assert_equal(list(other), list(found[0]), key)
            assert sum(failures.values()) == len(sentences) > 0, key
            assert all("its last good inverse stays; training goes on" in s for s in sentences), key
            for weight in weights.values():
                assert torch.isfinite(weight).all(), key
