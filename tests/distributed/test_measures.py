"""Measures of data that several processes hold a part of each, against those of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import measures
from natgrad.errors import SettingError
from natgrad.operators import Problem, ggn

CUTS = [0, 4, 5, 20]  # uneven parts


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def data():
    torch.manual_seed(1)
    return torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))


def measured(x, y):
    problem = Problem(model(), F.cross_entropy, (x, y))
    noise = measures.noise_scale(problem, matrix=ggn)
    tic = measures.tic(problem, matrix=ggn, damping=0.1)
    signs = measures.tic(problem, matrix=ggn, damping=0.1, by=measures.Signs(400))
    sharp = measures.sharpness(problem, region=measures.Ball(0.2, steps=3, restarts=1))
    noisy = measures.pac_bayes(problem, posterior=measures.Isotropic(0.1), samples=3)
    return {
        "simple": noise.simple,
        "curved": float(noise.curved),
        "samples": noise.samples,
        "tic": float(tic),
        "signs": (float(signs.trace), signs.trace.standard_error, float(tic.trace)),
        "fisher-rao": float(measures.fisher_rao(problem)),
        "variance": measures.gradient_variance(problem).parts,
        "largest": sharp.largest,
        "trace": float(sharp.trace),
        "worst": sharp.rise.worst,
        "loss": noisy.loss,
        "noisy loss": float(noisy.noisy_loss),
        "noisy error": float(noisy.noisy_error),
        "seeger": noisy.seeger,
        "sigma": measures.tolerated_sigma(problem, samples=3).sigma,
        "spectral": measures.spectral_bound(problem).inputs,
    }


def part():
    """What a rank finds."""
    import torch.distributed as dist

    x, y = data()
    mine = slice(*CUTS[dist.get_rank() :][:2])
    return measured(x[mine], y[mine])


@pytest.fixture(scope="module")
def ranks(world):
    return world.run(part, ranks=3)


def test_every_rank_finds_the_same(ranks):
    assert ranks[0] == ranks[1] == ranks[2]


def test_ranks_together_find_what_one_process_does(ranks):
    alone, (found, *_) = measured(*data()), ranks
    trace, error, exact = found.pop("signs")
    assert abs(trace - exact) < 4 * error  # other signs on every rank
    assert abs(alone.pop("signs")[2] - exact) < 1e-10 * exact
    for name, (variance, square) in alone.pop("variance").items():
        assert found["variance"][name] == pytest.approx((variance, square), rel=1e-9)
    assert found.pop("variance").keys() == dict(model().named_parameters()).keys()
    assert found == pytest.approx(alone, rel=1e-6)


def refused():
    """What a subset of samples says."""
    x, y = data()
    problem = Problem(model(), F.cross_entropy, (x, y))
    with pytest.raises(SettingError) as caught:
        measures.tic(problem, matrix=ggn, damping=0.1, by=measures.Subset(3))
    return str(caught.value)


def test_a_subset_is_refused(world):
    for sentence in world.run(refused, ranks=2):
        assert sentence == (
            "A subset of samples must lie in one process, but the data are spread over 2: give "
            "by=Signs(), which needs no exchange of samples."
        )
