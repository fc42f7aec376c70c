"""How many samples a step is over, whatever was called, and which passes count."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import KFAC
from natgrad.capture.passes import leading_size, sample_counts
from natgrad.errors import CaptureError

GAMMA = 1e-2
X = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return self.middle(self.encoder(x).tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def in_parts(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def loss_of(model: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def oracle(loss=loss_of) -> dict[str, Tensor]:
    """``(F + damping)^-1 grad`` of every layer, with F from gradients of single samples."""
    model = Parts()
    rows = []
    for x, y in zip(X, Y, strict=True):
        one = loss(model, x[None], y[None])
        rows.append(torch.autograd.grad(one, list(model.parameters()), allow_unused=True))
    found = {}
    for i, name in enumerate(("encoder", "middle", "head")):
        each = torch.stack(
            [torch.cat([r[2 * i], r[2 * i + 1][:, None]], 1).flatten() for r in rows]
        )
        matrix = each.mT @ each / len(X) + GAMMA * torch.eye(each.shape[1], dtype=each.dtype)
        step = torch.linalg.solve(matrix, each.mean(0))
        found[name] = step.view(len(rows[0][2 * i]), -1)
    return found


def check(model: Parts, expected: dict[str, Tensor]) -> None:
    for name, step in expected.items():
        layer = getattr(model, name)
        found = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        torch.testing.assert_close(found, step, msg=name)


def started(**settings) -> tuple[Parts, KFAC]:
    model = Parts()
    return model, KFAC(
        model, kl_clip=None, damping=GAMMA, structure=natgrad.Full(), update_every=1, **settings
    )


class TestParts:
    @pytest.mark.parametrize("chunks", [1, 3])
    @pytest.mark.parametrize("evaluates", [None, "before", "between", "with a graph"])
    def test_micro_batches_of_parts(self, chunks, evaluates):
        model, kfac = started()
        pairs = zip(X.chunk(chunks), Y.chunk(chunks), strict=True)
        for i, (x, y) in enumerate(pairs):
            if (evaluates == "before" and i == 0) or evaluates == "between":
                with torch.no_grad():
                    model(torch.randn(2, 5).double())  # a batch could be several of these
            elif evaluates == "with a graph":
                model(torch.randn(7, 5).double())
            (F.cross_entropy(model.in_parts(x), y) / chunks).backward()
        assert kfac.capture.samples() == 12
        kfac.step()
        check(model, oracle())

    def test_a_part_that_follows_the_model(self):
        """As a head outside of it: the same samples, not further ones."""
        model, kfac = started()
        out = model(X)
        F.cross_entropy(out + 0 * model.head(model.encode(X)), Y).backward()
        assert kfac.capture.samples() == 12

    def test_several_sizes_are_told_of(self):
        model, kfac = started()
        flat = model.encode(X[:, None].expand(-1, 4, -1).flatten(0, 1)).view(12, 4, 6).mean(1)
        F.cross_entropy(model.head(flat), Y).backward()
        with pytest.warns(UserWarning, match=r"layers saw several sizes \(12, 48\).*step\(samples"):
            kfac.step()
        flat = model.encode(X[:, None].expand(-1, 4, -1).flatten(0, 1)).view(12, 4, 6).mean(1)
        F.cross_entropy(model.head(flat), Y).backward()
        kfac.step(samples=12)

    def test_one_part_that_is_called_twice_is_told_of(self):
        """Two views of the same samples, or twice as many of them: the sizes do not tell."""
        model, kfac = started()
        F.cross_entropy(model.head(model.encode(X) + model.encode(-X)), Y).backward()
        with pytest.warns(UserWarning, match=r"a layer was called several times \(12\), so that"):
            kfac.step()


class TestSizes:
    def test_what_may_be_the_number_of_samples(self):
        packed = pack_sequence([torch.zeros(n, 2) for n in (5, 3, 2)])
        assert leading_size((packed,), 0) == 3  # and not those of the last time step
        assert sample_counts((torch.zeros(1), torch.zeros(4, 2)), 0) == [1, 4]
        assert sample_counts(([torch.zeros(4, 2), torch.zeros(4)],), 0) == [2, 4]
        assert sample_counts((torch.zeros(7, 4), {"x": torch.zeros(7, 5)}), 1) == [4, 5]
        assert sample_counts((torch.tensor(3.0), "text"), 0) == []

    def test_a_time_before_the_samples(self):
        class Timed(Parts):
            def forward(self, t: Tensor, x: Tensor) -> Tensor:
                return super().forward(x * t.mean())

        model = Timed()
        kfac = KFAC(model, kl_clip=None, damping=GAMMA, structure=natgrad.Full())
        F.cross_entropy(model(torch.ones(1).double(), X), Y).backward()
        with pytest.warns(UserWarning, match="sizes 1 and 12.*layers saw 12, so KFAC counts 12"):
            kfac.step()
        check(model, oracle())

    def test_a_list_of_inputs(self):
        class Two(Parts):
            def forward(self, xs: list[Tensor]) -> Tensor:
                return super().forward(xs[0] + 0 * xs[1])

        model = Two()
        kfac = KFAC(model, kl_clip=None, damping=GAMMA, structure=natgrad.Full())
        F.cross_entropy(model([X, X]), Y).backward()
        with pytest.warns(UserWarning, match="sizes 2 and 12.*so KFAC counts 12"):
            kfac.step()

    @pytest.mark.filterwarnings("error")
    def test_sizes_that_layers_bear_out(self):
        """A mask of another size, and a list of images, are no reason to worry."""

        class Masked(Parts):
            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return super().forward(x * mask[0])

        model = Masked()
        kfac = KFAC(model, kl_clip=None)
        F.cross_entropy(model(X, torch.ones(6, 5).double()), Y).backward()
        kfac.step()

    @pytest.mark.filterwarnings("ignore:The model was called with sizes 1 and 12")
    @pytest.mark.parametrize("saved", [False, True], ids=["", "saved between"])
    def test_the_size_that_layers_bore_out_holds_between_updates(self, saved):
        """A sum is divided by the number of samples at every step, also where no layer is watched
        to say which size that is."""

        class Timed(Parts):
            def forward(self, t: Tensor, x: Tensor) -> Tensor:
                return super().forward(x * t.mean())

        gradients = []
        for times in (1, len(X)):
            model = Timed()
            kfac = self.of_sums(model)
            for step in range(3):
                if saved and step == 1:
                    state, kfac = kfac.state_dict(), self.of_sums(model)
                    kfac.load_state_dict(state)
                model.zero_grad()
                out = model(torch.ones(times).double(), X)
                F.cross_entropy(out, Y, reduction="sum").backward()
                kfac.step()
            gradients.append([p.grad for p in model.parameters()])
        for found, expected in zip(*gradients, strict=True):
            assert torch.equal(found, expected)

    @staticmethod
    def of_sums(model: nn.Module) -> KFAC:
        every = {"update_every": 5, "refresh_every": 5}
        return KFAC(model, kl_clip=None, loss=natgrad.SumLoss(), **every)


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(-3), nn.Linear(16, 3)).double()


class TestSamplesWithoutAnAxis:
    """``model(x)`` of one sample ``x [features]``: these are not as many samples."""

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("loss", [None, natgrad.MeanLoss(), natgrad.SumLoss()], ids=repr)
    @pytest.mark.parametrize("make", [Parts, images])
    @pytest.mark.parametrize("every", [1, 2])
    def test_it_is_one(self, loss, make, every):
        shape = (3, 4, 4) if make is images else (5,)
        data = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1)).double()
        gradients = []
        for alone in (False, True):
            model = make()
            kfac = KFAC(model, kl_clip=None, loss=loss, update_every=every, refresh_every=every)
            for _ in range(2):
                model.zero_grad()
                for x, y in zip(data, Y, strict=False):
                    out = model(x) if alone else model(x[None])
                    total = F.cross_entropy(out.view(-1), y)
                    (total if isinstance(loss, natgrad.SumLoss) else total / 6).backward()
                kfac.step()
            gradients.append([p.grad for p in model.parameters()])
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected)

    @pytest.mark.filterwarnings("error")
    def test_a_loop_over_samples_is_none(self):
        class Loop(Parts):
            def forward(self, x: Tensor) -> Tensor:
                return torch.stack([super(Loop, self).forward(one) for one in x])

        model = Loop()
        kfac = KFAC(model, kl_clip=None, damping=GAMMA, structure=natgrad.Full())
        F.cross_entropy(model(X), Y).backward()
        kfac.step()
        check(model, oracle())

    @pytest.mark.parametrize("inner", [nn.LSTM(5, 4), nn.MultiheadAttention(5, 1)], ids=repr)
    def test_one_sequence_alone_is_told_of(self, inner):
        """Linear layers around it see its tokens as if they were samples."""

        class Sequence(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.inner = nn.Linear(5, 5), inner

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                found = self.inner(x) if isinstance(inner, nn.LSTM) else self.inner(x, x, x)
                return found[0].mean(0)

        model = Sequence().double()
        kfac = KFAC(model, kl_clip=None)
        model(X[:7]).square().sum().backward()
        with pytest.warns(UserWarning, match=r"with 7 samples, but \w+ 'inner.* as in x\[None\]"):
            kfac.step()


class TestThreads:
    def test_a_model_that_is_called_in_two_threads_at_once_is_refused(self):
        class Waits(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                both.wait(20)
                both.wait(20)
                return x.tanh()

        both = Barrier(2)
        model = nn.Sequential(nn.Linear(5, 4), Waits(), nn.Linear(4, 3)).double()
        kfac = KFAC(model, kl_clip=None)
        with ThreadPoolExecutor(2) as pool:
            outputs = list(pool.map(model, (X[:5], X[5:])))
        for out, y in zip(outputs, (Y[:5], Y[5:]), strict=True):
            (F.cross_entropy(out, y) / 2).backward()
        with pytest.raises(CaptureError, match="in one thread while another one was inside of it"):
            kfac.step()

    def test_threads_in_turn(self):
        gradients = []
        for apart in (False, True):
            model = Parts()
            kfac = KFAC(model, kl_clip=None, damping=GAMMA, structure=natgrad.Full())

            def batch(n, model=model):
                F.cross_entropy(model(X[n : n + 6]), Y[n : n + 6]).div(2).backward()

            with ThreadPoolExecutor(1) as pool:
                for n in (0, 6):
                    pool.submit(batch, n).result() if apart else batch(n)
                pool.submit(kfac.step).result() if apart else kfac.step()
            gradients.append([p.grad for p in model.parameters()])
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


class TestBackwards:
    def test_two_losses_on_one_graph(self):
        def both(model, x, y):
            out = model(x)
            return F.cross_entropy(out, y) + out.square().sum(1).mean()

        model, kfac = started()
        out = model(X)
        F.cross_entropy(out, Y).backward(retain_graph=True)
        out.square().sum(1).mean().backward()
        assert kfac.capture.samples() == 12
        kfac.step()
        check(model, oracle(both))

    def test_a_graph_that_is_retained_for_nothing(self):
        model, kfac = started()
        F.cross_entropy(model(X), Y).backward(retain_graph=True)
        kfac.step()
        check(model, oracle())
        assert not kfac.capture.waiting

    def test_two_heads_on_one_trunk(self):
        """The head that only one of the losses reaches has its statistics, too."""
        model, kfac = started()
        hidden = model.encode(X)
        hidden.square().sum(1).mean().backward(retain_graph=True)
        F.cross_entropy(model.head(hidden), Y).backward()
        kfac.step(samples=12)

        def both(model, x, y):
            hidden = model.encode(x)
            return hidden.square().sum(1).mean() + F.cross_entropy(model.head(hidden), y)

        check(model, oracle(both))

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("chunks", [1, 3])
    def test_the_whole_model_is_computed_again(self, reentrant, chunks):
        model, kfac = started()
        with torch.no_grad():
            model(X[:5])
        for x, y in zip(X.chunk(chunks), Y.chunk(chunks), strict=True):
            out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
            (F.cross_entropy(out, y) / chunks).backward()
        assert kfac.capture.samples() == 12
        kfac.step()
        check(model, oracle())

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("order", ["before forward", "before backward"])
    def test_gradients_that_were_set_to_zero(self, to_none, order):
        model, kfac = started()
        F.cross_entropy(model(3 * X), Y).backward()
        if order == "before forward":
            model.zero_grad(set_to_none=to_none)
        out = model(X)
        if order == "before backward":
            model.zero_grad(set_to_none=to_none)
        F.cross_entropy(out, Y).backward()
        assert kfac.capture.samples() == 12
        with pytest.warns(UserWarning, match=r"set to zero before the step.*kfac.discard\(\)"):
            kfac.step()
        check(model, oracle())

    @pytest.mark.filterwarnings("error")
    def test_gradients_that_are_kept_or_scaled_count(self):
        model, kfac = started()
        for i, (x, y) in enumerate(zip(X.chunk(3), Y.chunk(3), strict=True)):
            (F.cross_entropy(model(x), y) / 3).backward()
            if i == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert kfac.capture.samples() == 12
        kfac.step()
        check(model, oracle())

    @pytest.mark.filterwarnings("error")
    def test_gradients_that_are_taken_by_hand_count(self):
        model, kfac = started()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
            grads = torch.autograd.grad(F.cross_entropy(model(x), y) / 3, list(model.parameters()))
            total = [a + b for a, b in zip(total, grads, strict=True)]
        for p, grad in zip(model.parameters(), total, strict=True):
            p.grad = grad
        assert kfac.capture.samples() == 12
        kfac.step()
        check(model, oracle())

    @pytest.mark.parametrize("where", ["at the output", "in the middle"])
    def test_a_backward_pass_that_failed_and_is_done_again(self, where):
        def fails(*_: object) -> None:
            raise ValueError("in the middle")

        model, kfac = started()
        if where == "in the middle":
            handle = model.middle.register_full_backward_hook(fails)
        out = model(X)
        if where == "at the output":
            out.register_hook(fails)
        with pytest.raises(ValueError, match="in the middle"):
            F.cross_entropy(out, Y).backward()
        if where == "in the middle":
            handle.remove()
        model.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        assert kfac.capture.samples() == 12
        with pytest.warns(UserWarning, match="or the pass has failed"):
            kfac.step()
        check(model, oracle())

    def test_what_a_failed_pass_left_behind_is_refused(self):
        model, kfac = started()
        handle = model.middle.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            F.cross_entropy(model(X), Y).backward()
        handle.remove()
        with pytest.raises(CaptureError, match=r"failed in the middle.*kfac.discard\(\)"):
            kfac.step()
        kfac.discard()
        model.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        kfac.step()
        check(model, oracle())

    @pytest.mark.filterwarnings("error")
    def test_zeroed_after_every_step_is_as_always(self):
        model = Parts()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, update_every=1, curvature=natgrad.MonteCarloFisher())
        for _ in range(3):
            optimizer.zero_grad()
            out = model(X)
            kfac.observe(out)
            F.cross_entropy(out, Y).backward()
            assert kfac.capture.samples() == 12
            kfac.step()
            optimizer.step()

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("curvature", [None, natgrad.ExactFisher()], ids=["two", "exact"])
    def test_graphs_that_every_backward_pass_makes_anew(self, curvature, reentrant):
        """A reentrant checkpoint runs again in each of two backward passes, and after the vectors
        of a Fisher were sent back: its layers would be left out, or counted in parts."""
        model = Parts()
        how = {"kl_clip": None, "update_every": 1, "refresh_every": 1, "damping": 0.01}
        kfac = KFAC(model, curvature=curvature, **how)
        out = model.head(
            checkpoint(model.encode, X.clone().requires_grad_(), use_reentrant=reentrant)
        )
        if curvature is not None:
            kfac.observe(out)
        loss = F.cross_entropy(out, Y)
        if curvature is None:
            (0.3 * loss).backward(retain_graph=True)
            loss = 0.7 * loss
        loss.backward()
        if reentrant:
            with pytest.raises(CaptureError, match=r"Linear '\w+' is in a checkpoint with use_re"):
                kfac.step()
            return
        kfac.step()
        whole = Parts()
        its = KFAC(whole, curvature=curvature, **how)
        F.cross_entropy(whole(X), Y).backward()
        its.step()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    def test_observed_after_another_forward_pass(self):
        model = Parts()
        kfac = KFAC(model, kl_clip=None, curvature=natgrad.MonteCarloFisher())
        out = model(X)
        with torch.no_grad():
            model(X[:5])
        kfac.observe(out)  # an evaluation is no reason to refuse it
        assert kfac.capture.samples() == 12
        kfac.discard()
        out = model(X)
        model(X[:5])
        with pytest.raises(CaptureError, match="not of the model's last forward pass"):
            kfac.observe(out)
