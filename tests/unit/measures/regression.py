"""Ridge and logistic regression in float64, with the minimum in closed form or by Newton's method.

Nothing here uses natgrad. The model is one linear layer without a bias, ``theta [d]``.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.float64


@dataclass
class Data:
    """``x [n, d]``, ``y [n]``."""

    x: Tensor
    y: Tensor

    @property
    def pair(self):
        """As a model with one output takes it."""
        return self.x, self.y.unsqueeze(1)

    def without(self, n):
        keep = torch.arange(len(self.x)) != n
        return Data(self.x[keep], self.y[keep])


def draw(n=12, d=4, classes=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=DTYPE)
    signal = x @ torch.linspace(-1, 1, d, dtype=DTYPE)
    noise = torch.randn(n, generator=generator, dtype=DTYPE)
    return Data(x, (signal + noise > 0).to(DTYPE) if classes else signal + 0.3 * noise)


def linear(theta):
    model = nn.Linear(len(theta), 1, bias=False, dtype=DTYPE)
    with torch.no_grad():
        model.weight.copy_(theta.detach().unsqueeze(0))
    return model


def ridge(data, decay, scale=None):
    """``argmin 1/n Σ (x theta - y)² + 1/2 decay |theta|²``; ``decay`` a number or ``[d]``, and
    ``scale``: the number that the sum is divided by, if that is not n."""
    n, d = data.x.shape
    n = scale or n
    penalty = torch.as_tensor(decay, dtype=DTYPE).expand(d)
    hessian = 2 / n * data.x.T @ data.x + torch.diag(penalty)
    return torch.linalg.solve(hessian, 2 / n * data.x.T @ data.y), hessian


def logistic(data, decay, scale=None):
    """``argmin 1/n Σ log(1 + exp(∓ x theta)) + 1/2 decay |theta|²`` and the Hessian there."""
    n, d = data.x.shape
    n = scale or n
    penalty = torch.as_tensor(decay, dtype=DTYPE).expand(d)
    theta = torch.zeros(d, dtype=DTYPE)
    for _ in range(50):
        p = (data.x @ theta).sigmoid()
        gradient = data.x.T @ (p - data.y) / n + penalty * theta
        hessian = data.x.T @ (data.x * (p * (1 - p)).unsqueeze(1)) / n + torch.diag(penalty)
        theta = theta - torch.linalg.solve(hessian, gradient)
    return theta, hessian


def mean_loss(data, theta, classes):
    f = data.x @ theta
    return F.binary_cross_entropy_with_logits(f, data.y) if classes else F.mse_loss(f, data.y)
