"""Beside everything else a training loop does: accumulation, mixed precision, checkpointing,
compilation, clipping, every optimizer, schedules."""

import gc
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import natgrad
from kfac_keywords import LOSSES
from natgrad import KFAC
from natgrad.errors import CaptureError, CoverageError
from training_loops import (
    CHOICES,
    MLP,
    NETS,
    STRUCTURES,
    Net,
    Twice,
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


@pytest.fixture
def nothing_old():
    """Makes the garbage collector look at new objects only, as there are millions of old ones. They
    stay out of its sight: the next collection, of whoever asks for one, would look at all again."""
    gc.collect()
    gc.freeze()


def live_bytes():
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def count_calls(monkeypatch, owner, name):
    """Counts the calls of a function from here on."""
    counter = {"calls": 0}
    real = getattr(owner, name)

    def call(*args, **kwargs):
        counter["calls"] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return counter


class TestAccumulation:
    @pytest.mark.parametrize("structure", STRUCTURES, ids=str)
    def test_micro_batches_give_what_one_batch_gives(self, structure):
        found = []
        for parts in (1, 4):
            model, _, kfac = start(NETS["attention"], structure=structure)
            x, y = NETS["attention"].batch(16)
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            assert kfac.capture.samples() == 16
            kfac.step()
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][0], found[0][0], 1e-4)
        assert_close(found[1][1], found[0][1], 1e-5)

    @pytest.mark.parametrize("net", NETS)
    @pytest.mark.parametrize(
        "settings",
        [{}, {"structure": natgrad.EKFAC()}, {"curvature": natgrad.MonteCarloFisher()}],
        ids=["empirical", "EKFAC", "Monte Carlo"],
    )
    def test_memory_does_not_grow_with_their_number(self, net, settings, nothing_old):
        net = NETS[net]
        model, _, kfac = start(net, **settings)
        sums, live = [], []
        for seed in range(4):
            out = model(net.batch(seed=seed)[0])
            kfac.observe(out)
            F.cross_entropy(out, net.batch(seed=seed)[1]).backward()
            del out
            sums.append(kfac.memory().total["sums"])
            live.append(live_bytes())
        assert len(set(sums)) == 1
        assert sums[0] > 0
        assert live[1] == live[2] == live[3]
        kfac.step()
        assert kfac.memory().total.get("sums", 0) == 0

    def test_memory_of_a_wide_layer(self, nothing_old):
        model = nn.Linear(400, 400)
        kfac = KFAC(model, kl_clip=None, update_every=5, inverse=natgrad.Cholesky())
        model(torch.randn(8, 400)).square().mean().backward()
        kfac.step()
        live = []
        for _ in range(4):
            model(torch.randn(8, 400)).square().mean().backward()
            live.append(live_bytes())
        assert live[1] == live[2] == live[3]

    def test_hook_calls(self, monkeypatch):
        from natgrad.capture.hooks import Capture

        seen = count_calls(monkeypatch, Capture, "watch_gradient")
        model, optimizer, kfac = start(NETS["twice"], update_every=3)
        counts = []
        for x, y in NETS["twice"].batches(4):
            train(model, optimizer, kfac, [(x, y)])
            counts.append(seen["calls"])
        # Four layer calls on the steps 0 and 3, and none on the others.
        assert counts == [4, 4, 4, 8]

    @pytest.mark.parametrize("net", NETS)
    def test_a_step_that_updates_nothing_has_no_hook(self, net):
        model, optimizer, kfac = start(NETS[net], update_every=2)
        for index, batch in enumerate(NETS[net].batches(4)):
            assert (hooks(model) > 0) == (index % 2 == 0)
            train(model, optimizer, kfac, [batch])


class TestMixedPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("net", NETS)
    def test_autocast(self, net, dtype):
        net = NETS[net]
        found = []
        for enabled in (False, True):
            model, _, kfac = start(net)
            x, y = net.batch(64)
            with torch.autocast("cpu", dtype, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            kfac.step()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            found.append(factors(kfac))
        assert_close(found[1], found[0], 0.1)

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_backward_and_step_inside_of_autocast(self, structure, inverse):
        """Not as it is meant, but common: statistics and products stay in float32."""
        found = []
        for inside in (False, True):
            model, _, kfac = start(NETS["cnn"], structure=structure, inverse=inverse)
            x, y = NETS["cnn"].batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss.backward()
                kfac.step()
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-6)
        assert_close(found[1][0], found[0][0], 1e-5)

    @pytest.mark.parametrize("own_unscale", [False, True])
    @pytest.mark.parametrize("net", ["mlp", "cnn", "attention"])
    @pytest.mark.parametrize(
        "settings",
        [{}, {"curvature": natgrad.MonteCarloFisher()}, {"inverse": natgrad.Cholesky()}],
        ids=["empirical", "Monte Carlo", "Cholesky"],
    )
    def test_a_scaled_run_is_the_unscaled_run(self, net, own_unscale, settings):
        net = NETS[net]
        found = []
        for scaled in (False, True):
            model = net.model()
            optimizer = SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
            kfac = KFAC(model, optimizer, scaler=scaler, **often(**settings))
            for x, y in net.batches(4):
                optimizer.zero_grad()
                out = model(x)
                kfac.observe(out)
                scaler.scale(F.cross_entropy(out, y)).backward()
                if own_unscale:
                    scaler.unscale_(optimizer)
                kfac.step()
                scaler.step(optimizer)
                scaler.update()
            found.append((weights(model), factors(kfac)))
        assert_close(found[1][0], found[0][0], 1e-5)
        assert_close(found[1][1], found[0][1], 1e-5)

    @pytest.mark.parametrize("own_unscale", [False, True])
    def test_a_skipped_step(self, own_unscale):
        """An overflow: no weight moves, nothing is kept of it, and the scale goes down."""
        model = MLP.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        kfac = KFAC(model, optimizer, scaler=scaler, **often())
        before, skipped = weights(model), 0
        for x, y in MLP.batches(4):
            optimizer.zero_grad()
            scaler.scale(1e3 * F.cross_entropy(model(x), y)).backward()
            if own_unscale:
                scaler.unscale_(optimizer)
            kfac.step()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                skipped += 1
                assert_equal(weights(model), before)
                scaler.update(2.0**10)
        assert skipped == 1
        assert [int(block.dropped) for block in kfac.blocks] == [1, 1, 1]
        assert kfac.preconditioning.zeroed == 1
        assert all(bool(torch.isfinite(w).all()) for w in weights(model))
        assert not torch.equal(weights(model)[0], before[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("net", NETS)
    def test_models_in_other_precisions(self, net, dtype):
        model = NETS[net].model().to(dtype)
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often())
        x, y = NETS[net].batch()
        train(model, optimizer, kfac, 2 * [(x.to(dtype) if x.is_floating_point() else x, y)])
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        for block in kfac.blocks:
            assert all(part.dtype == wide for parts in block.parts.values() for part in parts)
        assert all(p.grad.dtype == dtype for p in model.parameters())


class Segments(nn.Module):
    """Runs a model's parts under activation checkpointing, or not."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def run(self, part, x):
        if self.reentrant is None:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = x.clone().requires_grad_() if x.is_floating_point() else x
        if isinstance(self.model, Twice):
            x = self.run(lambda t: self.model.shared(self.model.first(t).tanh()).tanh(), x)
            return self.model.last(self.run(lambda t: self.model.shared(t).tanh(), x))
        if isinstance(self.model, nn.Sequential):
            half = len(self.model) // 2
            return self.model[half:](self.run(self.model[:half], x))
        return self.model.head(self.run(lambda t: self.model.attention(t, t, t)[0].mean(1), x))


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("structure", STRUCTURES, ids=str)
    @pytest.mark.parametrize("net", ["mlp", "cnn", "attention", "twice"])
    def test_recomputed_activations_count_once(self, net, structure, reentrant):
        found = []
        for way in (None, reentrant):
            model = Segments(NETS[net].model(), way)
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(model, optimizer, **often(structure=structure))
            train(model, optimizer, kfac, NETS[net].batches(2))
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-5)
        assert_close(found[1][0], found[0][0], 1e-4)

    @pytest.mark.parametrize("curvature", [natgrad.MonteCarloFisher(), natgrad.ExactFisher()])
    def test_a_fisher_that_observes(self, curvature):
        found = []
        for way in (None, False):
            model = Segments(MLP.model(), way)
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(model, optimizer, **often(curvature=curvature))
            train(model, optimizer, kfac, MLP.batches(2))
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-5)
        assert_close(found[1][0], found[0][0], 1e-4)

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("order", ["first, second", "second, first", "together"])
    def test_several_forward_passes_before_the_backward(self, reentrant, order):
        """What is recomputed belongs to the pass whose gradient comes back, of another size."""
        found = []
        for way in (None, reentrant):
            model = Segments(NETS["twice"].model(), way)
            kfac = KFAC(model, kl_clip=None, **often(structure=natgrad.EKFAC()))
            losses = []
            for n in (6, 10):
                x, y = NETS["twice"].batch(n, seed=n)
                losses.append(F.cross_entropy(model(x), y, reduction="sum") / 16)
            with torch.no_grad():
                model(NETS["twice"].batch(5)[0])
            if order == "together":
                sum(losses).backward()
            else:
                for loss in losses if order == "first, second" else reversed(losses):
                    loss.backward()
            assert kfac.capture.samples() == 16
            kfac.step()
            found.append((gradients(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-5)
        assert_close(found[1][0], found[0][0], 1e-4)


class TestInPlace:
    def test_in_place_activations(self):
        found = []
        for inplace in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(2, 4, 3),
                nn.ReLU(inplace),
                nn.Conv2d(4, 4, 3),
                nn.BatchNorm2d(4),
                nn.ELU(inplace=inplace),
                nn.Flatten(),
                nn.Linear(16, 3),
                nn.Hardtanh(inplace=inplace),
            )
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(model, optimizer, **often())
            train(model, optimizer, kfac, NETS["cnn"].batches(2))
            found.append((weights(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-5)
        assert_close(found[1][0], found[0][0], 1e-5)

    @pytest.mark.parametrize("curvature", [None, natgrad.ExactFisher()])
    def test_outputs_changed_in_place(self, curvature):
        class Residual(nn.Module):
            def __init__(self, inplace):
                super().__init__()
                self.one, self.two, self.inplace = nn.Linear(4, 4), nn.Linear(4, 3), inplace

            def forward(self, x):
                h = self.one(x)
                h = h.add_(x).mul_(0.5) if self.inplace else (h + x) * 0.5
                return self.two(h.tanh())

        found = []
        for inplace in (False, True):
            torch.manual_seed(0)
            model = Residual(inplace)
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(model, optimizer, **often(curvature=curvature))
            train(model, optimizer, kfac, MLP.batches(2))
            found.append((weights(model), factors(kfac)))
        assert_close(found[1][1], found[0][1], 1e-6)
        assert_close(found[1][0], found[0][0], 1e-6)


class CountingBackend:
    """Compiles to the graph itself and counts how often compiled code runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield CountingBackend()
    torch._dynamo.reset()


class Regional(nn.Module):
    """A network one part of which is worth compiling."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x).tanh()

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 5), self.Part(), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.part(self.part(self.first(x))))


REGIONAL = Net(Regional, MLP.sample)
COMPILED = ["torch.compile(model)", "model.compile()", "a submodule", "a submodule in place"]


def compiled(how, model, backend):
    """The model to call, and to pass to KFAC."""
    if how == "torch.compile(model)":
        return torch.compile(model, backend=backend)
    if how == "model.compile()":
        model.compile(backend=backend)
    elif how == "a submodule":
        model.part = torch.compile(model.part, backend=backend)
    elif how == "a submodule in place":
        model.part.compile(backend=backend)
    return model


# torch.compile asks every tensor for its gradient, also one that can have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
class TestCompiled:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("how", COMPILED)
    def test_updates_run_eagerly_and_the_rest_compiled(self, how, warm, reduction, backend):
        """Also where the model was compiled and called before KFAC came."""
        net, found = REGIONAL, []
        for kind in ("eager", how):
            model = net.model()
            called = compiled(kind, model, backend)
            x, y = net.batch()
            if warm:
                called(x)
                assert backend.runs or kind == "eager"
            backend.runs = 0
            optimizer = SGD(model.parameters(), lr=0.1)
            kfac = KFAC(called, optimizer, **often(update_every=3, loss=LOSSES[reduction]()))
            names = {block.name for block in kfac.blocks}
            runs = []
            for step in range(5):
                optimizer.zero_grad()
                F.cross_entropy(called(x), y, reduction=reduction).backward()
                kfac.step()
                optimizer.step()
                runs.append(backend.runs)
                assert float(kfac.blocks[0].running["A"].weight) == pytest.approx(
                    1 - 0.95 ** (1 + step // 3)
                )
            if kind != "eager":
                # Steps 0 and 3 update; the part is called twice in every other.
                calls = 2 if "submodule" in kind else 1
                assert runs == [0, calls, 2 * calls, 2 * calls, 3 * calls]
            found.append((weights(model), factors(kfac), names))
            kfac.detach()
        assert found[0][2] == found[1][2] == {"first", "part.linear", "last"}
        assert_close(found[1][0], found[0][0], 1e-5)
        assert_close(found[1][1], found[0][1], 1e-5)

    @pytest.mark.parametrize("how", COMPILED)
    def test_detach_gives_the_compiled_form_back(self, how, backend):
        net = REGIONAL
        model = net.model()
        called = compiled(how, model, backend)
        kfac = KFAC(called, kl_clip=None, **often())
        x, _ = net.batch()
        called(x)
        assert backend.runs == 0
        kfac.detach()
        assert hooks(model) == 0
        called(x)
        assert backend.runs > 0

    def test_ahead_of_time(self):
        """A backend that traces the backward pass, too."""
        torch._dynamo.reset()
        found = []
        for way in (False, True):
            model = MLP.model()
            optimizer = SGD(model.parameters(), lr=0.1)
            called = torch.compile(model, backend="aot_eager") if way else model
            kfac = KFAC(called, optimizer, **often(update_every=2))
            train(called, optimizer, kfac, MLP.batches(4))
            found.append(weights(model))
        torch._dynamo.reset()
        assert_close(found[1], found[0], 1e-5)

    def test_a_compiled_function_that_was_called_before(self, backend):
        model = MLP.model()
        function = torch.compile(lambda x: model(x), backend=backend)
        x, y = MLP.batch()
        function(x)
        kfac = KFAC(model, kl_clip=None)
        F.cross_entropy(function(x), y).backward()
        with pytest.raises(CaptureError, match="There are gradients at step 0 but no statistics"):
            kfac.step()

    @pytest.mark.parametrize("after", [True, False])
    def test_a_compiled_function_around_a_part(self, after, backend):
        """Its layers are named once, whatever the others do; or they are seen."""
        model = NETS["twice"].model()
        x, y = NETS["twice"].batch()
        if not after:
            inner = torch.compile(lambda t: model.shared(t), backend=backend)
            inner(model.first(x))
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often())
        if after:
            inner = torch.compile(lambda t: model.shared(t), backend=backend)
            F.cross_entropy(model.last(inner(model.first(x))), y).backward()
            kfac.step()
            assert all(block.ready for block in kfac.blocks)
        else:
            F.cross_entropy(model.last(inner(model.first(x))), y).backward()
            with pytest.warns(UserWarning, match="Linear 'shared' has a gradient but gave no stat"):
                kfac.step()

    def test_a_compiled_function_around_the_model_is_right(self, backend):
        """Compiled code breaks off at the hooks, so nothing is lost but speed."""
        found = []
        for way in (False, True):
            model, optimizer, kfac = start(update_every=2)
            called = torch.compile(lambda x, m=model: m(x), backend=backend) if way else model
            for x, y in MLP.batches(4):
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                kfac.step()
                optimizer.step()
            found.append((weights(model), factors(kfac)))
        assert_close(found[1][0], found[0][0], 1e-5)
        assert_close(found[1][1], found[0][1], 1e-5)

    def test_a_whole_graph_around_the_model_says_what_to_do(self, backend):
        model = MLP.model()
        kfac = KFAC(model, kl_clip=None)
        x, _ = MLP.batch()
        function = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
        with pytest.raises(Exception, match=r"Compile the model itself, model = torch.compile"):
            function(x)
        kfac.detach()
        function(x)


class TestClipping:
    def test_before_the_step_scales_what_is_preconditioned(self):
        found = []
        for clips in (False, True):
            model, optimizer, kfac = start(kl_clip=None)
            backward(model, optimizer, kfac, *MLP.batch())
            norm = nn.utils.get_total_norm(gradients(model))
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 3)
            kfac.step()
            found.append((gradients(model), factors(kfac)))
        assert_equal(found[1][1], found[0][1])  # statistics come from the backward pass
        assert_close([3 * g for g in found[1][0]], found[0][0], 1e-4)

    def test_after_the_step_bounds_what_the_optimizer_sees(self):
        model, optimizer, kfac = start(kl_clip=None, damping=1e-4)
        for x, y in MLP.batches(3):
            backward(model, optimizer, kfac, x, y)
            kfac.step()
            assert nn.utils.get_total_norm(gradients(model)) > 0.1
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert nn.utils.get_total_norm(gradients(model)) == pytest.approx(0.1, rel=1e-4)
            optimizer.step()


def kl_total(model, raw, rates):
    """``sum lr^2 |<preconditioned, raw>|`` by hand."""
    return sum(
        rate**2 * float((p.grad.double() * g.double()).sum().abs())
        for p, g, rate in zip(model.parameters(), raw, rates, strict=True)
    )


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


def test_layers_of_two_precisions_are_clipped_together():
    """By the sum of what each of them moves: the same number for all, as in one precision."""
    found = []
    for cast in (Doubled(), nn.Identity()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), cast, nn.Linear(3, 2))
        net[3].to(torch.float64 if isinstance(cast, Doubled) else torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        kfac = KFAC(net, optimizer, **often(kl_clip=1e-6))
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.linspace(-1, 1, 32).view(8, 4)).square().mean().backward()
            kfac.step()
        found.append([p.grad.float() for p in net.parameters()])
    assert_close(found[0], found[1], 1e-3)


def test_a_setting_that_is_changed_later_acts_at_the_next_step():
    *_, kfac = start(damping=0.1)
    kfac.settings.damping = 0.7
    assert kfac.settings.at(kfac.steps).damping == 0.7


class TestKLClip:
    @pytest.mark.parametrize("inverse", [natgrad.Eigen(), natgrad.Cholesky()], ids=str)
    @pytest.mark.parametrize("clip", [1e-6, 1e-3, 1e6])
    def test_groups_with_learning_rates_of_their_own(self, clip, inverse):
        """Weight and bias in different groups, a parameter in none (Pauloski 2022, eq. 16)."""
        found = []
        rates = [0.1, 0.1, 0.5, 0.01, 0.1, 0.0]
        for kl_clip in (None, clip):
            model = MLP.model()
            parameters = list(model.parameters())
            optimizer = SGD(
                [
                    {"params": [parameters[i] for i in (0, 1, 4)]},
                    {"params": [parameters[2]], "lr": 0.5},
                    {"params": [parameters[3]], "lr": 0.01},
                ],
                lr=0.1,
            )
            kfac = KFAC(model, optimizer, **often(kl_clip=kl_clip, inverse=inverse))
            F.cross_entropy(model(MLP.batch()[0]), MLP.batch()[1]).backward()
            raw = gradients(model)
            kfac.step()
            if kl_clip is None:
                # The two products of the first layer have one learning rate: they count together.
                total = kl_total(model, raw, rates)
            found.append(gradients(model))
        scale = min(1.0, math.sqrt(clip / total))
        assert (scale < 1) == (clip < 1)
        assert_close(found[1], [scale * g for g in found[0]], 1e-4)

    def test_a_scheduler_changes_the_learning_rate(self):
        found = []
        for rate in (0.1, 0.05):
            model, optimizer, kfac = start(lr=0.1, kl_clip=1e-7)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t, r=rate: r / 0.1)
            assert optimizer.param_groups[0]["lr"] == rate
            backward(model, optimizer, kfac, *MLP.batch())
            kfac.step()
            optimizer.step()
            scheduler.step()
            found.append(gradients(model))
        # sqrt(clip / (lr^2 ...)): half the rate allows twice the gradient.
        assert_close(found[1], [2 * g for g in found[0]], 1e-4)

    def test_a_group_that_is_added_later(self):
        model, _, kfac = start(kl_clip=1e-7)
        half = SGD(list(model.parameters())[:4], lr=0.1)
        kfac.preconditioning.rates.optimizers = (half,)
        train(model, half, kfac, MLP.batches(1))
        half.add_param_group({"params": list(model.parameters())[4:], "lr": 0.2})
        kfac.preconditioning.rates.read()
        assert kfac.preconditioning.rates.of(model[4].weight) == 0.2

    def test_a_tensor_as_learning_rate(self):
        model = MLP.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        kfac = KFAC(model, optimizer, **often())
        train(model, optimizer, kfac, MLP.batches(2))
        assert kfac.preconditioning.rates.of(model[0].weight) == pytest.approx(0.1)


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.02},
    "AdamW": {"lr": 0.02},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.02},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
    "Adamax": {"lr": 0.02},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 2.0},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.02},
}


class TestOptimizers:
    def test_the_list_is_complete(self):
        # LBFGS calls its closure itself, and SparseAdam takes sparse gradients only.
        left_out = {"Optimizer", "LBFGS", "SparseAdam"}
        names = {
            name
            for name in dir(torch.optim)
            if isinstance(getattr(torch.optim, name), type)
            and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
        }
        assert names - left_out <= set(OPTIMIZERS)

    @pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name)])
    def test_lowers_the_loss(self, name):
        model = MLP.model()
        parameters = list(model.parameters())
        if name == "Muon":  # it takes matrices only; biases stay where they are
            parameters = [p for p in parameters if p.ndim == 2]
        optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])
        kfac = KFAC(model, optimizer, **often())
        losses = train(model, optimizer, kfac, 6 * [MLP.batch()])
        assert losses[-1] < losses[0]

    def test_lbfgs_preconditions_inside_of_its_closure(self):
        """Every evaluation of the closure is a step of KFAC."""
        model = MLP.model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        kfac = KFAC(model, optimizer, **often(kl_clip=None))
        x, y = MLP.batch()
        losses = []

        def closure():
            loss = backward(model, optimizer, kfac, x, y)
            kfac.step()
            losses.append(float(loss.detach()))
            return loss

        for _ in range(5):
            optimizer.step(closure)
        assert kfac.steps == len(losses) == 15
        assert losses[-1] < losses[0]

    def test_a_closure_that_computes_gradients_anew(self):
        """A step of KFAC before ``optimizer.step(closure)`` is undone by the closure's backward."""
        model, _, kfac = start()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        x, y = MLP.batch()
        backward(model, optimizer, kfac, x, y)
        raw = gradients(model)
        kfac.step()

        def closure():
            return backward(model, optimizer, kfac, x, y)

        optimizer.step(closure)
        assert_close(gradients(model), raw, 1e-6)

    def test_without_an_optimizer(self):
        model = MLP.model()
        kfac = KFAC(model, kl_clip=None, **often())
        x, y = MLP.batch()
        losses = []
        for _ in range(5):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            kfac.step()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]


class TestSchedules:
    def test_damping_decay_and_clip_are_functions_of_the_step(self):
        asked = {"damping": [], "factor_decay": [], "kl_clip": [], "norm_damping": []}

        def note(name, value):
            def schedule(step):
                asked[name].append(step)
                return value(step)

            return schedule

        model, optimizer, kfac = start(
            NETS["cnn"],
            damping=note("damping", lambda t: 1e-2 / (1 + t)),
            factor_decay=note("factor_decay", lambda t: 0.5 + 0.1 * t),
            kl_clip=note("kl_clip", lambda t: 1e-3 * (1 + t)),
            norm_damping=note("norm_damping", lambda t: 1 + t),
        )
        train(model, optimizer, kfac, NETS["cnn"].batches(3))
        assert all(set(steps) == {0, 1, 2} for steps in asked.values())
        now = kfac.settings.at(3)
        assert now.damping == pytest.approx(1e-2 / 4)
        assert now.kl_clip == pytest.approx(4e-3)
        norm = next(block for block in kfac.blocks if block.normalises)
        assert now.damping_of(norm) == pytest.approx(1e-2)

    def test_decay_weighs_the_batches(self):
        """Bias-corrected: after two updates the weights are ``decay (1-first)`` and so on."""
        seen = []
        model, optimizer, kfac = start(factor_decay=lambda t: [0.9, 0.6, 0.3][t], lr=0.0)
        weight, mean = 0.0, 0.0
        for step, (x, y) in enumerate(MLP.batches(3)):
            train(model, optimizer, kfac, [(x, y)])
            ones = torch.cat([x, torch.ones(len(x), 1)], 1)
            new = ones.mT @ ones / len(x)
            decay = [0.9, 0.6, 0.3][step]
            weight = decay * weight + 1 - decay
            mean = mean + (1 - decay) / weight * (new - mean)
            seen.append(mean)
            assert_close([factors(kfac)["0.A"][0]], [mean], 1e-5)

    def test_damping_acts_at_once_on_eigenvalues(self):
        model, optimizer, kfac = start(
            kl_clip=None, damping=lambda t: 10.0**-t, update_every=9, refresh_every=9
        )
        x, y = MLP.batch()
        for step in range(3):
            backward(model, optimizer, kfac, x, y)
            raw = gradients(model)
            kfac.step()
            block = kfac.blocks[0]
            dense = block.structure.dense(block.kept(), block.forms, block.shape)
            rows = torch.cat([raw[0], raw[1].unsqueeze(1)], 1).flatten()
            expected = torch.linalg.solve(
                dense.double() + 10.0**-step * torch.eye(len(dense)), rows.double()
            ).view(6, 5)
            assert_close([model[0].weight.grad.double()], [expected[:, :4]], 1e-4)
            assert_close([model[0].bias.grad.double()], [expected[:, 4]], 1e-4)

    def test_norm_damping_acts_on_norm_layers_alone(self):
        found = []
        for norm_damping in (1.0, 100.0):
            model, optimizer, kfac = start(NETS["cnn"], kl_clip=None, norm_damping=norm_damping)
            backward(model, optimizer, kfac, *NETS["cnn"].batch())
            kfac.step()
            found.append(dict(model.named_parameters()))
        for name, p in found[0].items():
            same = torch.allclose(p.grad, found[1][name].grad, rtol=1e-4)
            assert same == (not name.startswith("1.")), name

    def test_norm_damping_is_the_damping_times_it(self):
        found = []
        for settings in ({"damping": 1e-3, "norm_damping": 7.0}, {"damping": 7e-3}):
            model, optimizer, kfac = start(NETS["cnn"], kl_clip=None, **settings)
            backward(model, optimizer, kfac, *NETS["cnn"].batch())
            kfac.step()
            found.append([model[1].weight.grad, model[1].bias.grad])
        assert_close(found[0], found[1], 1e-5)

    @pytest.mark.parametrize("every", [3, lambda t: 3], ids=["int", "function"])
    def test_intervals(self, every):
        model, optimizer, kfac = start(update_every=every, refresh_every=every)
        changed = []
        for batch in MLP.batches(8):
            before = {n: f.clone() for n, f in factors(kfac).items()}
            version = kfac.blocks[0].version
            train(model, optimizer, kfac, [batch])
            moved = not before or any(
                not torch.equal(before[n], f) for n, f in factors(kfac).items()
            )
            changed.append((moved, kfac.blocks[0].version != version))
        assert [step for step, (moved, _) in enumerate(changed) if moved] == [0, 3, 6]
        assert [step for step, (_, fresh) in enumerate(changed) if fresh] == [0, 3, 6]

    def test_clocks_for_inputs_and_gradients(self):
        model, optimizer, kfac = start(update_every={"A": 2, "G": 3}, refresh_every=1)
        moved = {"A": [], "G": []}
        for step, batch in enumerate(MLP.batches(7)):
            before = factors(kfac)
            train(model, optimizer, kfac, [batch])
            after = factors(kfac)
            for name, steps in moved.items():
                if not before or not torch.equal(before[f"2.{name}"], after[f"2.{name}"]):
                    steps.append(step)
        assert moved == {"A": [0, 2, 4, 6], "G": [0, 3, 6]}

    def test_clocks_for_the_decompositions(self):
        model, optimizer, kfac = start(refresh_every={"A": 2, "G": 3})
        moved = {"A": [], "G": []}
        for step, batch in enumerate(MLP.batches(7)):
            before = {n: [p.clone() for p in parts] for n, parts in kfac.blocks[1].parts.items()}
            train(model, optimizer, kfac, [batch])
            for name, steps in moved.items():
                after = kfac.blocks[1].parts[name]
                if not before or not torch.equal(before[name][1], after[1]):
                    steps.append(step)
        assert moved == {"A": [0, 2, 4, 6], "G": [0, 3, 6]}


class TestDrift:
    @pytest.fixture
    def decompositions(self, monkeypatch):
        return count_calls(monkeypatch, natgrad.Eigen, "decompose")

    def test_a_large_tolerance_refreshes_once(self, decompositions):
        model, optimizer, kfac = start(refresh_every=natgrad.schedules.Drift(1e6))
        train(model, optimizer, kfac, MLP.batches(5))
        assert decompositions["calls"] == 6

    def test_a_tiny_one_refreshes_at_every_update(self, decompositions):
        model, optimizer, kfac = start(refresh_every=natgrad.schedules.Drift(1e-12), update_every=2)
        train(model, optimizer, kfac, MLP.batches(5))
        assert decompositions["calls"] == 18  # at the steps 0, 2 and 4

    def test_the_longest_interval(self, decompositions):
        model, optimizer, kfac = start(refresh_every=natgrad.schedules.Drift(1e6, at_most=2))
        train(model, optimizer, kfac, MLP.batches(5))
        assert decompositions["calls"] == 18

    def test_only_what_has_moved(self, decompositions):
        """Inputs of the first layer stay what they are, and everything else moves."""
        model, optimizer, kfac = start(refresh_every=natgrad.schedules.Drift(1e-4))
        train(model, optimizer, kfac, 3 * [MLP.batch()])
        assert decompositions["calls"] == 6 + 2 * 5

    def test_one_kind_of_factor(self, decompositions):
        model, optimizer, kfac = start(refresh_every={"A": natgrad.schedules.Drift(1e6), "G": 1})
        train(model, optimizer, kfac, MLP.batches(4))
        assert decompositions["calls"] == 3 + 4 * 3

    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_every_structure(self, structure, inverse):
        drift = natgrad.schedules.Drift(0.05)
        model, optimizer, kfac = start(
            NETS["cnn"], refresh_every=drift, structure=structure, inverse=inverse
        )
        train(model, optimizer, kfac, NETS["cnn"].batches(4))
        for error in kfac.drift().error.values():
            assert error <= 0.05


class TestLevenbergMarquardt:
    def quadratic(self, damping=0.1, **settings):
        """Least squares on a linear model with a damping that the curvature is exact for."""
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = SGD(model.parameters(), lr=1.0)
        rule = natgrad.schedules.LevenbergMarquardt(start=damping, every=2, decay=0.9)
        fisher = natgrad.ExactFisher(natgrad.curvature.Gaussian())
        kfac = KFAC(
            model, optimizer, **often(kl_clip=None, damping=rule, curvature=fisher, **settings)
        )
        x = torch.randn(8, 3, dtype=torch.float64)
        return model, optimizer, kfac, x, torch.randn(8, 2, dtype=torch.float64)

    @staticmethod
    def loss(model, x, y):
        return 0.5 * (model(x) - y).square().sum(1).mean()

    def take(self, model, optimizer, kfac, x, y):
        optimizer.zero_grad()
        out = model(x)
        kfac.observe(out)
        before = 0.5 * (out - y).square().sum(1).mean()
        before.backward()
        kfac.step()
        optimizer.step()
        with torch.no_grad():
            return float(before), float(self.loss(model, x, y))

    def test_goes_down_where_the_prediction_is_good(self):
        model, optimizer, kfac, x, y = self.quadratic()
        dampings = []
        for _ in range(4):
            dampings.append(kfac.adapt(*self.take(model, optimizer, kfac, x, y)))
        # Every second step adapts, by decay ** every.
        assert dampings == pytest.approx([0.081, 0.081, 0.06561, 0.06561])

    def test_goes_up_where_the_prediction_is_bad(self):
        model, optimizer, kfac, x, y = self.quadratic()
        before, _ = self.take(model, optimizer, kfac, x, y)
        assert kfac.adapt(before, before + 1.0) == pytest.approx(0.1 / 0.81)
        before, _ = self.take(model, optimizer, kfac, x, y)
        assert kfac.adapt(before, before + 1.0) == pytest.approx(0.1 / 0.81)  # not its step
        before, _ = self.take(model, optimizer, kfac, x, y)
        assert kfac.adapt(before, float("nan")) == pytest.approx(0.1 / 0.81**2)

    def test_stays_in_its_range(self):
        rule = natgrad.schedules.LevenbergMarquardt(start=1e-2, low=9e-3, high=2e-2)
        assert rule.next(1e-2, 1.0) == 9e-3
        assert rule.next(1.9e-2, 0.0) == 2e-2
        assert rule.next(1.5e-2, 0.5) == 1.5e-2

    def dense_prediction(self, kfac, moved, grads, damping):
        change = sum(float((grads[n] * d).sum()) for n, d in moved.items())
        for block in kfac.blocks:
            dense = block.structure.dense(block.kept(), block.forms, block.shape).double()
            d = torch.empty(block.shape, dtype=torch.float64)
            names = {id(p): n for n, p in kfac.model.named_parameters()}
            block.layers[0].load(d, lambda p, names=names: moved[names[id(p)]])
            d = d.flatten()
            own = damping * (kfac.settings.at(0).norm_damping if block.normalises else 1.0)
            change += 0.5 * float(d @ dense @ d + own * d @ d)
        return change

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("structure", STRUCTURES, ids=str)
    @pytest.mark.parametrize("net", ["mlp", "cnn", "attention"])
    def test_the_predicted_change(self, net, structure, reduction):
        """``<grad, d> + d (F + damping) d / 2`` with a dense ``F``, for whatever step was taken."""
        model = NETS[net].model().double()
        optimizer = SGD(model.parameters(), lr=0.1)
        rule = natgrad.schedules.LevenbergMarquardt(start=0.05, every=1)
        settings = {"structure": structure, "norm_damping": 2.0, "loss": LOSSES[reduction]()}
        kfac = KFAC(model, optimizer, **often(damping=rule, **settings))
        x, y = NETS[net].batch(12)
        for _ in range(2):  # EKFAC begins with a stand-in for S
            optimizer.zero_grad()
            F.cross_entropy(model(x.double()), y, reduction=reduction).backward()
            kfac.step()
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x.double()), y, reduction=reduction)
        losses.backward()
        per_sample = 1.0 if reduction == "mean" else 1 / 12
        grads = {n: p.grad * per_sample for n, p in model.named_parameters()}
        old = {n: p.detach().clone() for n, p in model.named_parameters()}
        kfac.step()
        optimizer.step()
        moved = {n: p.detach() - old[n] for n, p in model.named_parameters()}
        expected = self.dense_prediction(kfac, moved, grads, 0.05) / per_sample
        ratio = kfac.prediction.ratio(1.0, 1.0 + expected, kfac.settings.at(0))
        assert ratio == pytest.approx(1.0, rel=1e-6)

    def test_the_predicted_change_of_damped_factors(self):
        """With Cholesky the damping is part of what is inverted."""
        model, optimizer, kfac, x, y = self.quadratic(inverse=natgrad.Cholesky())
        before, after = self.take(model, optimizer, kfac, x, y)
        ratio = kfac.prediction.ratio(before, after, kfac.settings.at(0))
        assert 0.75 < ratio < 2.5

    def test_the_loss_may_be_averaged_over_terms(self):
        """A mean over the entries of a sample, too: the ratio is the same, for the same damping of
        all of them together."""
        found = []
        for terms in (1, 2):
            model, optimizer, kfac, x, y = self.quadratic(
                loss=natgrad.MeanLoss(terms), damping=0.1 / terms
            )
            out = model(x)
            kfac.observe(out)
            (self.loss(model, x, y) / terms).backward()
            with torch.no_grad():
                before = float(self.loss(model, x, y)) / terms
                kfac.step()
                optimizer.step()
                after = float(self.loss(model, x, y)) / terms
            found.append(kfac.prediction.ratio(before, after, kfac.settings.at(0)))
        assert found[1] == pytest.approx(found[0], rel=1e-6)


class TestSelection:
    def names(self, **settings):
        kfac = KFAC(MLP.model(), kl_clip=None, **settings)
        return {block.name for block in kfac.blocks}

    def test_include_and_exclude(self):
        assert self.names() == {"0", "2", "4"}
        assert self.names(include="2") == {"2"}
        assert self.names(include=["0", "4"]) == {"0", "4"}
        assert self.names(include=["[02]"]) == {"0", "2"}
        assert self.names(exclude=["0"]) == {"2", "4"}
        assert self.names(include=["*"], exclude=["4"]) == {"0", "2"}

    def test_a_pattern_for_a_module_means_all_inside_of_it(self):
        model = nn.ModuleDict({"body": MLP.model(), "head": nn.Linear(3, 3)})
        assert {b.name for b in KFAC(model, kl_clip=None, include="body").blocks} == {
            "body.0",
            "body.2",
            "body.4",
        }
        assert {b.name for b in KFAC(model, kl_clip=None, exclude="body").blocks} == {"head"}

    def test_modules(self):
        model = NETS["attention"].model()
        kfac = KFAC(model, kl_clip=None, include=model.head)
        assert {block.name for block in kfac.blocks} == {"head"}
        model = NETS["attention"].model()
        kfac = KFAC(model, kl_clip=None, exclude=[model.attention])
        assert {block.name for block in kfac.blocks} == {"head"}
        assert "excluded" in set(kfac.coverage().uncovered.values())

    def test_what_is_left_out_keeps_its_gradient(self):
        model, optimizer, kfac = start(exclude=["2"], kl_clip=None)
        backward(model, optimizer, kfac, *MLP.batch())
        raw = model[2].weight.grad.clone()
        kfac.step()
        assert torch.equal(model[2].weight.grad, raw)
        assert kfac.coverage().uncovered == {"2.weight": "excluded", "2.bias": "excluded"}

    @pytest.mark.parametrize("name", ["include", "exclude"])
    def test_a_pattern_that_matches_nothing(self, name):
        with pytest.raises(CoverageError, match=f"{name} has 'head', which matches no module of"):
            KFAC(MLP.model(), kl_clip=None, **{name: ["head"]})
