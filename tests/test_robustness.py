"""What goes wrong stays contained: bad numbers, failed decompositions, copies, interruptions."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.overrides import _get_current_function_mode_stack

from kfac_keywords import LOSSES
from natgrad import KFAC
from natgrad.capture.tensor_hooks import GradientHook
from natgrad.errors import CaptureError
from training_loops import (
    CHOICES,
    INVERSES,
    MLP,
    NETS,
    STRUCTURES,
    assert_close,
    assert_equal,
    backward,
    factors,
    gradients,
    hooks,
    often,
    start,
    train,
    weights,
)

NAMES = list(NETS)
BAD = [float("nan"), float("inf"), -float("inf")]


def poison(where, value, model, optimizer, x, y):
    """A backward pass with one bad number in it."""
    optimizer.zero_grad()
    if where == "input":
        x = x.clone()
        x[0, ..., 0] = value
    out = 1.0 * model(x)
    if where == "gradient":
        out.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), value))
    loss = F.cross_entropy(out, y)
    (loss * value if where == "loss" else loss).backward()


def all_zero(model):
    return all(p.grad is None or not p.grad.any() for p in model.parameters())


def finite(tensors):
    return all(bool(torch.isfinite(t).all()) for t in tensors)


class TestBadNumbers:
    @pytest.mark.parametrize(
        ("where", "value"),
        [("input", float("nan")), *((where, v) for where in ("loss", "gradient") for v in BAD)],
    )
    def test_a_bad_batch_is_as_if_it_had_never_been_seen(self, where, value):
        model, optimizer, kfac = start()
        train(model, optimizer, kfac, MLP.batches(2))
        before = kfac.state_dict()["blocks"]
        poison(where, value, model, optimizer, *MLP.batch())
        kfac.step()
        assert all_zero(model)
        after = kfac.state_dict()["blocks"]
        for name in before:
            assert_equal(after[name]["factors"], before[name]["factors"])
            assert after[name]["dropped"] == 1
        assert kfac.preconditioning.zeroed == 1
        assert {row[-1] for row in kfac.coverage().rows} == {"preconditioned, 1 updates dropped"}
        # What follows is what a run does that has seen the other batches only.
        other, its_optimizer, its_kfac = start()
        train(other, its_optimizer, its_kfac, MLP.batches(2))
        rest = list(MLP.batches(5))[2:]
        assert train(model, optimizer, kfac, rest) == train(other, its_optimizer, its_kfac, rest)
        assert_equal(factors(kfac), factors(its_kfac))

    @pytest.mark.parametrize("value", BAD[1:], ids=str)
    def test_an_infinite_input(self, value):
        """The first tanh swallows it, so that only the first layer has seen a bad number."""
        model, optimizer, kfac = start()
        train(model, optimizer, kfac, MLP.batches(2))
        poison("input", value, model, optimizer, *MLP.batch())
        kfac.step()
        assert all_zero(model)
        assert [int(block.dropped) for block in kfac.blocks] == [1, 0, 0]

    @pytest.mark.parametrize("net", ["mlp", "cnn", "attention", "twice"])
    @pytest.mark.parametrize("where", ["input", "loss", "gradient"])
    def test_the_very_first_batch(self, net, where):
        model, optimizer, kfac = start(NETS[net])
        poison(where, float("nan"), model, optimizer, *NETS[net].batch())
        kfac.step()
        assert all_zero(model)
        assert {row[-1] for row in kfac.coverage().rows} == {"no statistics yet"}
        if net != "cnn":  # its BatchNorm has the bad batch in its running statistics, for eval only
            optimizer.step()
        train(model, optimizer, kfac, NETS[net].batches(3))
        assert finite(weights(model))
        assert all("preconditioned" in row[-1] for row in kfac.coverage().rows)
        other, its_optimizer, its_kfac = start(NETS[net])
        train(other, its_optimizer, its_kfac, NETS[net].batches(3))
        assert_equal(factors(kfac), factors(its_kfac))

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_every_structure(self, structure, inverse):
        model, optimizer, kfac = start(structure=structure, inverse=inverse)
        train(model, optimizer, kfac, MLP.batches(2))
        before = kfac.state_dict()["blocks"]
        poison("loss", float("nan"), model, optimizer, *MLP.batch())
        kfac.step()
        assert all_zero(model)
        for name, block in kfac.state_dict()["blocks"].items():
            for key, factor in block["factors"].items():
                # EKFAC's S follows the basis, which is computed anew.
                assert_close([factor["mean"]], [before[name]["factors"][key]["mean"]], 1e-5)
        train(model, optimizer, kfac, MLP.batches(2))
        assert finite(weights(model))

    def test_layers_that_saw_no_bad_number_keep_their_statistics(self):
        model, optimizer, kfac = start()
        train(model, optimizer, kfac, MLP.batches(1))
        x, y = MLP.batch()
        optimizer.zero_grad()
        hidden = model[:4](x)
        hidden.register_hook(lambda g: g * float("nan"))
        F.cross_entropy(model[4:](hidden), y).backward()
        kfac.step()
        assert all_zero(model)
        assert [int(block.dropped) for block in kfac.blocks] == [1, 1, 0]

    def test_on_a_step_that_updates_nothing(self):
        model, optimizer, kfac = start(update_every=10, refresh_every=10)
        train(model, optimizer, kfac, MLP.batches(2))
        before = factors(kfac)
        poison("loss", float("nan"), model, optimizer, *MLP.batch())
        kfac.step()
        assert all_zero(model)
        assert_equal(factors(kfac), before)

    def test_in_a_parameter_that_has_no_block(self):
        net = nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))
        optimizer = SGD(net.parameters(), lr=0.1)
        kfac = KFAC(net, optimizer, **often())
        x, y = MLP.batch()
        backward(net, optimizer, kfac, x, y)
        net[1].weight.grad[1] = float("nan")
        kfac.step()
        assert all_zero(net)

    def test_in_a_block_that_is_not_ready(self, monkeypatch):
        model, optimizer, kfac = start(include=["0"])
        train(model, optimizer, kfac, MLP.batches(1))
        other, its_optimizer, its_kfac = start()
        for block in its_kfac.blocks[1:]:
            monkeypatch.setattr(block, "decompose", lambda names, damping, rows: {})  # never ready
        backward(other, its_optimizer, its_kfac, *MLP.batch())
        other[2].bias.grad[0] = float("inf")
        its_kfac.step()
        assert all_zero(other)

    def test_in_a_sparse_gradient(self):
        net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3))
        optimizer = SGD(net.parameters(), lr=0.1)
        kfac = KFAC(net, optimizer, **often())
        tokens, y = torch.randint(7, (16,)), MLP.batch()[1]
        train(net, optimizer, kfac, [(tokens, y)])
        assert net[0].weight.grad.is_sparse
        assert net[0].weight.grad.to_dense().any()
        poison("loss", float("nan"), net, optimizer, tokens, y)
        kfac.step()
        assert not net[0].weight.grad.to_dense().any()
        assert not net[1].weight.grad.any()


class TestDegenerate:
    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    @pytest.mark.parametrize("damping", [1e-3, 0.0])
    def test_zero_gradient(self, structure, inverse, damping):
        model, optimizer, kfac = start(structure=structure, inverse=inverse, damping=damping)
        x, _ = MLP.batch()
        for _ in range(2):
            optimizer.zero_grad()
            (0.0 * model(x)).sum().backward()
            kfac.step()
            assert all_zero(model)
            assert finite(gradients(model))
        train(model, optimizer, kfac, MLP.batches(2))
        assert finite(weights(model))

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    @pytest.mark.parametrize("value", [0.0, 3.0])
    def test_constant_input(self, structure, inverse, value):
        model, optimizer, kfac = start(structure=structure, inverse=inverse)
        x, y = MLP.batch()
        losses = train(model, optimizer, kfac, 8 * [(torch.full_like(x, value), y)])
        assert losses[-1] < losses[0]
        assert finite(weights(model))

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    @pytest.mark.parametrize("damping", [1e-3, 0.0])
    def test_rank_deficient_factors(self, structure, inverse, damping):
        """Two samples for factors of up to 13 rows; damping 0 must not divide by 0."""
        net = NETS["cnn"]
        model, optimizer, kfac = start(net, structure=structure, inverse=inverse, damping=damping)
        for x, y in net.batches(3, n=2):
            backward(model, optimizer, kfac, x, y)
            kfac.step()
            assert finite(gradients(model))
            optimizer.step()
        assert finite(weights(model))
        assert kfac.preconditioning.zeroed == 0

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_damping_0_with_a_factor_of_rank_1(self, structure, inverse):
        model = nn.Linear(4, 3)
        kfac = KFAC(model, kl_clip=None, **often(structure=structure, inverse=inverse, damping=0))
        x, y = MLP.batch(1)
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        assert finite(gradients(model))

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_dimensions_of_1(self, structure, inverse):
        model = nn.Sequential(
            nn.Unflatten(1, (1, 1)),
            nn.Conv1d(1, 1, 1),
            nn.BatchNorm1d(1),
            nn.Flatten(),
            nn.LayerNorm(1),
            nn.Linear(1, 1, bias=False),
            nn.Linear(1, 1),
        )
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often(structure=structure, inverse=inverse))
        for n in (1, 5):
            model.train(n > 1)  # BatchNorm needs more than one sample to train
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(n, 1)), torch.randn(n, 1)).backward()
            kfac.step()
            assert finite(gradients(model))

    def test_an_empty_batch(self):
        for net in (MLP, NETS["attention"], NETS["tied"]):
            model, optimizer, kfac = start(net)
            train(model, optimizer, kfac, net.batches(2))
            before = factors(kfac)
            x, y = net.batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
            kfac.step()
            assert all_zero(model)
            assert_equal(factors(kfac), before)
            train(model, optimizer, kfac, net.batches(2))
            assert finite(weights(model))

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_an_empty_batch_at_the_first_step(self, reduction):
        model, _, kfac = start(loss=LOSSES[reduction]())
        x, y = MLP.batch()
        F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
        kfac.step()
        assert kfac.steps == 1
        assert all_zero(model)

    @pytest.mark.parametrize("structure", STRUCTURES, ids=str)
    def test_an_empty_micro_batch_counts_for_nothing(self, structure):
        net = NETS["cnn"]
        x, y = net.batch(8)
        found = []
        for sizes in ((8,), (8, 0)):
            model, _, kfac = start(net, structure=structure)
            model.eval()  # BatchNorm refuses to train on nothing
            for n in sizes:
                loss = F.cross_entropy(model(x[:n]), y[:n], reduction="sum") / 8
                loss.backward()
            kfac.step()
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][0], found[0][0], 1e-6)
        assert_close(found[1][1], found[0][1], 1e-6)


@pytest.fixture
def failing(monkeypatch):
    """Decompositions that fail on demand: `failing["times"]` more of them will."""
    state = {"times": 0, "calls": 0}
    for name in ("eigh", "cholesky"):
        real = getattr(torch.linalg, name)

        def call(*args, real=real, **kwargs):
            state["calls"] += 1
            if state["times"] > 0:
                state["times"] -= 1
                raise torch.linalg.LinAlgError("made to fail")
            return real(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, call)
    return state


FOREVER = 10**9


@pytest.mark.parametrize("inverse", INVERSES, ids=str)
class TestFailedDecomposition:
    def test_once_is_repaired_in_float64(self, inverse, failing):
        found = []
        for times in (0, 1):
            model, optimizer, kfac = start(inverse=inverse)
            failing["times"] = times
            backward(model, optimizer, kfac, *MLP.batch())
            kfac.step()
            found.append(gradients(model))
            assert all(block.failures == 0 for block in kfac.blocks)
        assert_close(found[1], found[0], 1e-4)

    def test_always_keeps_the_last_good_inverse(self, inverse, failing):
        model, optimizer, kfac = start(inverse=inverse)
        train(model, optimizer, kfac, MLP.batches(2))
        before = {b.name: [p.clone() for p in b.parts["A"]] for b in kfac.blocks}
        failing["times"] = FOREVER
        with pytest.warns(UserWarning, match="could not be decomposed") as caught:
            train(model, optimizer, kfac, MLP.batches(3))
        sentences = [str(w.message) for w in caught]
        assert sorted(sentences) == sorted(
            f"Factor {factor} of Linear '{name}' could not be decomposed, so its last good inverse "
            "stays; training goes on. If this repeats, raise the damping."
            for name in "024"
            for factor in "AG"
        )
        assert caught[0].filename.endswith("training_loops.py"), (
            "the warning points at the call of step()"
        )
        for block in kfac.blocks:
            assert_equal(list(block.parts["A"]), before[block.name])
            assert block.failures == 6
        assert {row[-1] for row in kfac.coverage().rows} == {
            "preconditioned, 6 decompositions failed"
        }
        assert finite(weights(model))
        failing["times"] = 0
        train(model, optimizer, kfac, MLP.batches(1))
        assert not torch.equal(kfac.blocks[0].parts["A"][0], before["0"][0])

    def test_always_from_the_start_leaves_the_gradient_and_recovers(self, inverse, failing):
        model, optimizer, kfac = start(inverse=inverse)
        failing["times"] = FOREVER
        backward(model, optimizer, kfac, *MLP.batch())
        raw = gradients(model)
        with pytest.warns(UserWarning, match="so its gradient stays as it is"):
            kfac.step()
        assert_equal(gradients(model), raw)
        failing["times"] = 0
        backward(model, optimizer, kfac, *MLP.batch())
        kfac.step()
        other, its_optimizer, its_kfac = start(inverse=inverse)
        for _ in range(2):
            backward(other, its_optimizer, its_kfac, *MLP.batch())
            its_kfac.step()
        assert_close(gradients(model), gradients(other), 1e-6)


@pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
def test_every_structure_survives_failures(structure, inverse, failing):
    model, optimizer, kfac = start(NETS["cnn"], structure=structure, inverse=inverse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for times in (FOREVER, 0, FOREVER, 7, 0):
            failing["times"] = times
            train(model, optimizer, kfac, NETS["cnn"].batches(1))
    assert finite(weights(model))
    assert all(block.ready for block in kfac.blocks)


class Stumbles(nn.Module):
    """Raises inside of a forward pass when told to."""

    def __init__(self, error=RuntimeError):
        super().__init__()
        self.fails, self.error = False, error

    def forward(self, x):
        if self.fails:
            raise self.error("in the middle")
        return x


class TestInterruptions:
    def test_an_exception_in_forward(self):
        net = nn.Sequential(nn.Linear(4, 5), Stumbles(), nn.Linear(5, 3))
        other = copy.deepcopy(net)
        results = []
        for model, fails in ((net, True), (other, False)):
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(model, optimizer, **often())
            for x, y in MLP.batches(3):
                model[1].fails = fails
                if fails:
                    with pytest.raises(RuntimeError, match="in the middle"):
                        model(torch.cat([x, x]))
                model[1].fails = False
                backward(model, optimizer, kfac, x, y)
                kfac.step()
                optimizer.step()
            results.append((weights(model), factors(kfac)))
        assert_equal(results[0], results[1])

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_exception_inside_of_attention(self, error):
        """The mode that sees the projections must not stay on."""

        def fails(*args, **kwargs):
            raise error("in the middle")

        results = []
        for interrupted in (True, False):
            net = NETS["attention"]
            model, optimizer, kfac = start(net)
            for x, y in net.batches(3):
                if interrupted:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(torch, "bmm", fails)
                        with pytest.raises(error):
                            model(x)
                    if error is RuntimeError:
                        assert not _get_current_function_mode_stack()
                train(model, optimizer, kfac, [(x, y)])
                assert not _get_current_function_mode_stack()
            results.append((weights(model), factors(kfac)))
        assert_equal(results[0], results[1])

    def test_an_exception_before_the_mode_of_attention_is_entered(self):
        model = NETS["attention"].model()
        state = {"fails": True}

        def check(module, args):
            if state["fails"]:
                raise RuntimeError("not today")

        model.attention.register_forward_pre_hook(check)
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often())
        x, y = NETS["attention"].batch()
        with pytest.raises(RuntimeError, match="not today"):
            model(x)
        state["fails"] = False
        train(model, optimizer, kfac, [(x, y)])
        assert not _get_current_function_mode_stack()

    @pytest.mark.parametrize("net", NAMES)
    @pytest.mark.parametrize("graph", [True, False])
    @pytest.mark.parametrize("place", ["before", "between"])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_evaluation_in_between(self, net, graph, place, reduction):
        """Also between a forward pass and its backward, and with another number of samples."""
        net = NETS[net]
        results = []
        for evaluates in (True, False):
            model, optimizer, kfac = start(net, loss=LOSSES[reduction]())

            def evaluate(model=model, wanted=evaluates):
                if wanted:
                    model.eval()
                    with torch.set_grad_enabled(graph):
                        model(net.batch(7, seed=9)[0])
                    model.train()

            for x, y in net.batches(2):
                optimizer.zero_grad()
                if place == "before":
                    evaluate()
                loss = F.cross_entropy(model(x), y, reduction=reduction)
                if place == "between":
                    evaluate()
                loss.backward()
                assert kfac.capture.samples() == len(x)
                kfac.step()
                optimizer.step()
            results.append((weights(model), factors(kfac)))
        assert_equal(results[0], results[1])

    def test_a_backward_pass_that_builds_a_graph_does_not_count(self):
        """A gradient penalty that is left out on purpose: statistics are those of the rest."""
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        fake, true, mixed = (torch.randn(5, 4, dtype=torch.float64) for _ in range(3))
        mixed.requires_grad_()
        results = []
        for penalised in (False, True):
            model = copy.deepcopy(net)
            kfac = KFAC(model, kl_clip=None, **often())
            loss = model(fake).mean() - model(true).mean()
            if penalised:
                with kfac.unwatched():
                    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
                    loss = loss + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
            loss.backward()
            assert kfac.capture.samples() == 10
            kfac.step()
            results.append(factors(kfac))
        assert_equal(results[0], results[1])

    def test_a_first_order_pass_with_a_graph_before_the_loss(self):
        """The same batch twice: once for its input gradient, and once for training."""
        results = []
        for penalised in (True, False):
            model, optimizer, kfac = start()
            for x, y in MLP.batches(2):
                optimizer.zero_grad()
                out = model(x.requires_grad_())
                if penalised:
                    torch.autograd.grad(out.sum(), x, create_graph=True)
                F.cross_entropy(out, y).backward()
                kfac.step()
                optimizer.step()
            results.append((weights(model), factors(kfac)))
        assert_equal(results[0], results[1])


class TestCopies:
    @pytest.mark.parametrize("net", NAMES)
    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_has_no_live_hook(self, net, way):
        net = NETS[net]
        model, optimizer, kfac = start(net)
        train(model, optimizer, kfac, net.batches(1))
        assert hooks(model)
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        before = kfac.state_dict()
        x, y = net.batch()
        F.cross_entropy(twin(x), y).backward()
        assert not any(block.sums for block in kfac.blocks)
        assert kfac.capture.samples() is None
        kfac.detach()
        assert_equal(kfac.state_dict(), before)
        # A preconditioner of the copy's own does what that of the original would have done.
        its_optimizer = SGD(twin.parameters(), lr=0.1)
        its_kfac = KFAC(twin, its_optimizer, **often())
        train(twin, its_optimizer, its_kfac, [(x, y)])
        fresh = KFAC(model, kl_clip=None, **often())
        backward(model, optimizer, fresh, x, y)
        fresh.step()
        assert_close(factors(its_kfac), factors(fresh), 1e-6)

    @pytest.mark.parametrize("net", NAMES)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_detach_leaves_no_hook(self, net, reduction):
        net = NETS[net]
        model = net.model()
        assert hooks(model) == 0
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, loss=LOSSES[reduction](), **often())
        assert hooks(model) > 0
        x, y = net.batch()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        kfac.step()
        model(x)  # with something still in flight
        kfac.detach()
        assert hooks(model) == 0
        before = kfac.state_dict()
        F.cross_entropy(model(x), y).backward()
        assert_equal(kfac.state_dict(), before)

    @pytest.mark.parametrize("net", NAMES)
    @pytest.mark.parametrize("order", ["model first", "kfac first", "kfac in the model"])
    @pytest.mark.parametrize("settings", [{}, {"update_every": 3, "refresh_every": 3}])
    def test_model_optimizer_and_preconditioner_are_copied_together(self, net, order, settings):
        """The copy goes on as the original does, clip included, and neither sees the other."""
        net = NETS[net]
        model, optimizer, kfac = start(net, lr=3.0, **settings)
        train(model, optimizer, kfac, net.batches(2))
        if order == "kfac first":
            its_kfac, its_optimizer, twin = copy.deepcopy((kfac, optimizer, model))
        elif order == "model first":
            twin, its_optimizer, its_kfac = copy.deepcopy((model, optimizer, kfac))
        else:
            model.kfac = kfac
            twin, its_optimizer = copy.deepcopy((model, optimizer))
            its_kfac = twin.kfac
        assert its_kfac.model is twin
        assert its_kfac.optimizer is its_optimizer
        assert hooks(twin) == hooks(model)
        results = []
        for one, its, own in ((twin, its_optimizer, its_kfac), (model, optimizer, kfac)):
            train(one, its, own, net.batches(5))
            results.append((weights(one), factors(own)))
        assert_equal(results[0], results[1])
        unclipped, plain, free = start(net, lr=3.0, **settings, kl_clip=None)
        train(unclipped, plain, free, [*net.batches(2), *net.batches(5)])
        pairs = zip(weights(unclipped), weights(twin), strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)  # the clip has acted
        its_kfac.detach()
        assert hooks(twin) == 0

    def test_a_kfac_that_is_copied_alone_is_told_of(self):
        """It holds a model of its own, and would do nothing for the one that is trained."""
        model, _, kfac = start()
        twin = copy.deepcopy(kfac)
        x, y = MLP.batch()
        F.cross_entropy(model(x), y).backward()
        with pytest.warns(UserWarning, match="is a copy, and its model is one as well, which has"):
            twin.step()

    def test_two_preconditioners_at_once(self):
        alone = []
        for net in (MLP, NETS["attention"]):
            model, optimizer, kfac = start(net)
            train(model, optimizer, kfac, net.batches(3))
            alone.append((weights(model), factors(kfac)))
        pairs = [(net, *start(net)) for net in (MLP, NETS["attention"])]
        for batches in zip(*(net.batches(3) for net, *_ in pairs), strict=True):
            for (_, model, optimizer, kfac), (x, y) in zip(pairs, batches, strict=True):
                backward(model, optimizer, kfac, x, y)
            for _, _, optimizer, kfac in pairs:
                kfac.step()
                optimizer.step()
        for (_, model, _, kfac), (expected_weights, expected_factors) in zip(
            pairs, alone, strict=True
        ):
            assert_equal(weights(model), expected_weights)
            assert_equal(factors(kfac), expected_factors)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.uses = True

    def forward(self, x):
        out = self.always(x)
        return out + self.sometimes(x) if self.uses else out


class TestUnusedModules:
    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("structure", STRUCTURES, ids=str)
    def test_used_in_some_steps_and_never(self, structure, to_none):
        model = Branches()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often(structure=structure))
        blocks = {block.name: block for block in kfac.blocks}
        for index, (x, y) in enumerate(MLP.batches(6)):
            model.uses = index % 2 == 1
            optimizer.zero_grad(set_to_none=to_none)
            before = factors(kfac)
            F.cross_entropy(model(x), y).backward()
            kfac.step()
            after = factors(kfac)
            for key in before:
                changed = not torch.allclose(before[key], after[key], rtol=1e-5)
                assert changed == (model.uses or not key.startswith("sometimes"))
            optimizer.step()
        assert blocks["sometimes"].ready
        assert not blocks["never"].running
        states = dict(zip(kfac.coverage().column("parameter"), kfac.coverage().rows, strict=True))
        assert states["never.weight"][-1] == "no statistics yet"
        assert model.never.weight.grad is None

    def test_a_module_whose_weight_is_used_behind_its_back_is_named(self):
        class Sneaky(nn.Module):
            def __init__(self):
                super().__init__()
                self.open, self.hidden = nn.Linear(4, 4), nn.Linear(4, 3)

            def forward(self, x):
                return F.linear(self.open(x), self.hidden.weight, self.hidden.bias)

        model = Sneaky()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often())
        with pytest.warns(
            UserWarning, match="Linear 'hidden' has a gradient but gave no"
        ) as caught:
            train(model, optimizer, kfac, MLP.batches(3))
        assert [str(w.message) for w in caught] == [
            "Linear 'hidden' has a gradient but gave no statistics, so its curvature is not "
            "updated. Call the module itself, not a function of its weight, and compile modules, "
            "not functions that call them."
        ]

    def test_separate_clocks_are_no_silence(self):
        model, optimizer, kfac = start(NETS["cnn"], update_every={"A": 1, "G": 3})
        train(model, optimizer, kfac, NETS["cnn"].batches(4))

    def test_a_model_that_sees_its_own_input_again(self):
        """A shared input is handed on to other layers, and counted anew for the same one."""
        layer = nn.Linear(4, 3)
        kfac = KFAC(layer, kl_clip=None, **often())
        x, y = MLP.batch()
        for _ in range(3):
            F.cross_entropy(layer(x), y).backward()
        assert kfac.blocks[0].sums["A"].count == 3 * len(x)
        assert kfac.blocks[0].shares_input_with is None


def test_a_discarded_batch_leaves_no_trace():
    def run(bad):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, update_every=1, refresh_every=1)
        x, y = torch.randn(6, 3), torch.randint(2, (6,))
        if bad:
            F.cross_entropy(model(100 * x), y).backward()
            kfac.discard()
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_step_after_detach_is_refused():
    model = nn.Linear(3, 2)
    kfac = KFAC(model, kl_clip=None)
    kfac.detach()
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(CaptureError, match=r"after detach\(\).*make a new KFAC"):
        kfac.step()


@pytest.mark.parametrize("retain", [False, True])
def test_inputs_are_let_go_on_the_way_back(retain):
    """As autograd does with what it saved: kept only where a second backward pass may come."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kfac = KFAC(model, kl_clip=None)
    loss = model(torch.randn(5, 3)).sum()
    loss.backward(retain_graph=retain)
    hooks = [o for o in gc.get_objects() if type(o) is GradientHook and o.capture is kfac.capture]
    assert len(hooks) == 2
    assert [hook.x is not None for hook in hooks] == [retain, retain]
    assert loss.requires_grad  # the graph, and with it the hooks, lived until here
