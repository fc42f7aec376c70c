"""What must hold for a matrix to exist, each with its sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dense_matrices import ready
from natgrad import operators as ops
from natgrad.errors import SettingError
from unit.operators.small_problems import case, classes, randn, says

KINDS = (ops.hessian, ops.ggn, ops.fisher)


def batch(*shape, n=5):
    return randn(n, *(shape or (3,))), classes(n)


@pytest.mark.parametrize("make", KINDS)
class TestModes:
    def test_dropout(self, make):
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)).double()
        says(
            SettingError,
            "Dropout '1' is in training mode, in which it drops inputs at random, so there is no "
            "loss of a single sample: call model.eval() first.",
            make,
            model,
            F.cross_entropy,
            batch(),
        )
        make(model.eval(), F.cross_entropy, batch())
        make(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)).double(), F.cross_entropy, batch())

    @pytest.mark.parametrize(
        ("layer", "shape"), [(nn.BatchNorm1d(3), (3,)), (nn.BatchNorm2d(3), (3, 2, 2))]
    )
    def test_batch_norm(self, make, layer, shape):
        model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)).double().eval()
        model(batch(*shape)[0])
        model.train()
        says(
            SettingError,
            f"{type(layer).__name__} '0' is in training mode, in which it mixes the samples of a "
            "batch, so there is no loss of a single sample: call model.eval() first.",
            make,
            model,
            F.cross_entropy,
            batch(*shape),
        )
        make(model.eval(), F.cross_entropy, batch(*shape))


def test_no_model():
    says(
        SettingError,
        "model is an object of type function but must be a torch.nn.Module: give the module "
        "itself.",
        ops.hessian,
        F.relu,
        F.cross_entropy,
        batch(),
    )


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) + torch.linspace(0, 0.5 * float(torch.rand(())), 3)


def test_a_model_that_is_not_deterministic():
    torch.manual_seed(0)
    apart = 0.5 * abs(float(torch.rand(()) - torch.rand(())))
    torch.manual_seed(0)
    x, y = torch.zeros(5, 3), classes(5)
    torch.manual_seed(0)
    model = Noisy()
    torch.manual_seed(0)
    says(
        SettingError,
        f"Noisy gave two outputs for one batch that are {apart:.3g} apart, so its matrices are not "
        "defined: call model.eval(), or take away what is random in it.",
        ops.hessian,
        model,
        F.cross_entropy,
        (x, y),
    )
    ops.hessian(model, F.cross_entropy, (x, y), check=False)


class TestLosses:
    @pytest.mark.parametrize("reduction", ["sum", "none"])
    @pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss])
    def test_reductions(self, loss, reduction):
        says(
            SettingError,
            f"The loss has reduction='{reduction}' but must be a mean: pass reduction=\"mean\".",
            ops.ggn,
            ready(nn.Linear(3, 3)),
            loss(reduction=reduction),
            batch(),
        )

    def test_a_sum_of_ones_own(self):
        x, y = torch.ones(5, 3, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)
        model = ready(nn.Linear(3, 3))

        scale = 2 / float(model(x).detach().square().sum())

        def loss(f, y):
            return scale * (f - y).square().sum()

        says(
            SettingError,
            "The loss of 5 samples is 2 but the mean of their single losses is 0.4, so it is no "
            "mean over samples: divide by their number, and give weighted or ignored targets to "
            "natgrad.curvature.CrossEntropy.",
            ops.hessian,
            model,
            loss,
            (x, y),
        )
        ops.hessian(model, lambda f, y: loss(f, y) / len(f), (x, y))
        ops.hessian(model, loss, (x, y), check=False)

    def test_nothing_counts(self):
        """As the mean over no target at all is not a number."""
        own = case("classes")
        for make in KINDS:
            operator = make(own.model, own.loss, (own.x, torch.full_like(own.y, -100)))
            says(
                SettingError,
                "The weights of all targets sum to 0, so there is no mean over them: give data "
                "with targets that are not all ignored.",
                operator.trace,
            )


class TestSizes:
    def test_dense(self):
        model = nn.Linear(20000, 1, bias=False)
        operator = ops.ggn(model, F.mse_loss, (torch.zeros(1, 20000), torch.zeros(1, 1)))
        says(
            SettingError,
            "GGN has 20,000 x 20,000 entries, 1.5 GiB, above the limit of 1 GiB: use products, or "
            "a structure.",
            _with_limit(operator.dense),
        )

    def test_gram(self):
        model = nn.Linear(600, 1, bias=False)
        operator = ops.ggn(model, F.mse_loss, (torch.zeros(500, 600), torch.zeros(500, 1)))
        says(
            SettingError,
            "The Gram matrix has 500 x 500 entries, 0.0 GiB, above the limit of 0 GiB: use fewer "
            "samples, eigenvalues(k) or spectrum().",
            _with_limit(operator.exact_eigenvalues, 2**19),
        )


def _with_limit(call, limit=2**30):
    def limited():
        from natgrad.operators import requirements

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requirements, "LARGEST", limit)
            call()

    return limited
