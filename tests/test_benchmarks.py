"""The benchmarks measure what they say: sizes of networks, the average of a cycle, the yardstick.

The textbook K-FAC of `benchmarks/naive.py` is the yardstick of speed, so it must do the same
mathematics as the library: gradients are compared in float64.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import networks, timing
from benchmarks.naive import NaiveKFAC


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_networks_have_the_published_sizes():
    assert size(networks.resnet20()) == 269_722
    assert size(networks.resnet32()) == 464_154
    assert size(networks.cifar_resnet(20, project=True)) == 272_474
    assert size(networks.cifar_resnet(32, project=True)) == 466_906
    assert size(networks.resnet50()) == 25_557_032
    assert size(networks.mlp()) == 784 * 1024 + 2 * 1024 * 1024 + 10 * 1024 + 3 * 1024 + 10


@pytest.mark.parametrize(
    ("network", "shape", "outputs"),
    [
        (networks.resnet20, (3, 32, 32), 10),
        (lambda: networks.cifar_resnet(20, project=True), (3, 32, 32), 10),
        (networks.resnet50, (3, 64, 64), 1000),
        (networks.mlp, (784,), 10),
        (networks.encoder, (128, 256), 10),
        (networks.digits_autoencoder, (64,), 64),
        (networks.small_cnn, (1, 8, 8), 10),
    ],
)
def test_networks_run(network, shape, outputs):
    assert network()(torch.randn(2, *shape)).shape == (2, outputs)


def test_depth_of_a_cifar_network_is_checked():
    with pytest.raises(ValueError, match="not 30"):
        networks.cifar_resnet(30)


def test_kinds_of_step_in_a_cycle():
    assert timing.kinds(1, 1) == {"both": 1}
    assert timing.kinds(1, 10) == {"both": 1, "update": 9}
    assert timing.kinds(10, 100) == {"both": 1, "update": 9, "stale": 90}
    assert timing.kinds(2, 3) == {"both": 1, "update": 2, "refresh": 1, "stale": 2}


def test_average_step_is_the_mean_over_a_cycle():
    seconds = {"stale": 1.0, "update": 3.0, "both": 10.0}
    assert timing.average_step(seconds, 1, 1) == 10.0
    assert timing.average_step(seconds, 1, 10) == pytest.approx((10 + 9 * 3) / 10)
    assert timing.average_step(seconds, 10, 100) == pytest.approx((10 + 9 * 3 + 90) / 100)
    # Every second step updates, every third refreshes; a refresh alone is 1 + (10 - 3) = 8.
    assert timing.average_step(seconds, 2, 3) == pytest.approx((10 + 2 * 3 + 8 + 2 * 1) / 6)


def test_interleave_calls_in_turn_and_times_only_after_the_warm_up():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    after = {"b": lambda: order.append("after")}
    times = timing.interleave(calls, 2, warmup=1, burst=1, after=after)
    assert order == ["a", "b", "after"] * 3
    assert [len(times[name].seconds) for name in "ab"] == [2, 2]


def test_verdicts_and_tables():
    rows = [
        timing.Row("ratio", 1.05, "x", 1.06),
        timing.Row("speed", 9.0, "x", 10.0, at_least=True),
        timing.Row("plain", 3.0, "ms"),
    ]
    assert [row.verdict for row in rows] == ["met", "MISSED", ""]
    lines = timing.Table("title", rows).render().splitlines()
    assert lines[0] == "title"
    assert lines[1].split() == ["what", "figure", "goal", "verdict"]
    assert lines[3].split() == ["ratio", "1.05x", "<=", "1.06", "met"]
    markdown = timing.Table("title", rows).render(markdown=True).splitlines()
    assert markdown[0] == "### title"
    assert all(line.startswith("|") and line.endswith("|") for line in markdown[2:])
    assert len({len(line) for line in markdown[2:]}) == 1


def tiny_conv_net() -> nn.Module:
    """Strides, padding, a 1x1 convolution, with and without bias, then two Linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, 5),
    ).double()


def gradients(model: nn.Module, preconditioner, batches: list[tuple[Tensor, Tensor]]):
    """Gradients after each step; the weights stay, so that errors do not grow."""
    steps = []
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        grads = [parameter.grad for parameter in model.parameters()]
        steps.append(torch.cat([grad.flatten() for grad in grads]).clone())
    return steps


@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
def test_the_textbook_and_the_library_agree(inverse, kl_clip):
    import natgrad

    torch.manual_seed(1)
    model = tiny_conv_net()
    twin = tiny_conv_net()
    twin.load_state_dict(model.state_dict())
    batches = [(torch.randn(7, 2, 6, 6).double(), torch.randint(5, (7,))) for _ in range(6)]
    options = {"damping": 1e-2, "kl_clip": kl_clip, "update_every": 2, "refresh_every": 4}
    naive = NaiveKFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.1), inverse=inverse, **options
    )
    library = natgrad.KFAC(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        inverse=natgrad.Eigen() if inverse == "eigen" else natgrad.Cholesky(),
        **options,
    )
    expected = gradients(model, naive, batches)
    for ours, theirs in zip(gradients(twin, library, batches), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


def test_the_textbook_solves_the_damped_kronecker_system():
    torch.manual_seed(2)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    naive = NaiveKFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.1, kl_clip=None)
    logits = model(x)
    F.cross_entropy(logits, y).backward()
    raw = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).clone()
    naive.step()
    new = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    a = torch.cat([x, x.new_ones(5, 1)], 1)
    g = logits.softmax(1).detach() - F.one_hot(y, 2)  # of single samples, not of the mean
    fisher = torch.kron(g.T @ g / 5, a.T @ a / 5)
    expected = torch.linalg.solve(fisher + 0.1 * torch.eye(8).double(), raw.flatten())
    torch.testing.assert_close(new.flatten(), expected, rtol=1e-10, atol=1e-12)
