"""The PINN examples and their benchmark, in short form."""

import json

import pytest
import torch

from benchmarks import pinns


@pytest.fixture
def examples(monkeypatch):
    """Their modules; the default dtype is given back."""
    before = torch.get_default_dtype()
    yield pinns.example
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["pinn_poisson", "pinn_heat"])
def test_an_example_prints_its_table(examples, name, capsys):
    examples(name).main(["--seconds", "0.05"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[-3:]}
    assert list(rows) == ["K-FAC", "Adam", "LBFGS"]
    for steps, loss, error, half in rows.values():
        assert int(steps.replace(",", "")) > 0
        assert all(float(number) > 0 for number in (loss, error, half))


@pytest.mark.parametrize("name", ["pinn_poisson", "pinn_heat"])
def test_analytic_solutions_have_no_residual(examples, name):
    """The tasks are what they say: the residuals of the solution itself vanish."""
    torch.set_default_dtype(torch.float64)
    module = examples(name)

    class Solution(torch.nn.Module):
        def forward(self, x):
            return module.exact(x).unsqueeze(1)

    for r in module.TASK.residuals(Solution()):
        assert float(r.detach().abs().max()) < 1e-9
    assert module.TASK.error(Solution()) == 0


def test_the_benchmark_measures_and_draws(examples, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pinns, "TRIALS", {name: some[:2] for name, some in pinns.TRIALS.items()})
    given = ["--seconds", "0.05", "--seeds", "1", "--tasks", "heat"]
    out = ["--json", str(tmp_path / "runs.json")]
    pytest.importorskip("matplotlib")
    pinns.main([*given, *out, "--picture", str(tmp_path / "runs.svg")])
    printed = capsys.readouterr().out
    assert printed.count("| heat |") == 3
    assert printed.count("heat, Adam (") == printed.count("heat, LBFGS (") == 2
    found = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))
    runs = found["runs"]["heat"]
    assert set(runs) == {"K-FAC", "Adam", "LBFGS"}
    assert runs["Adam"]["best"] == min(runs["Adam"]["tried"])[1]
    assert runs["K-FAC"]["tried"] == runs["K-FAC"]["best"] == []
    assert (tmp_path / "runs.svg").stat().st_size > 1000


def test_the_nearest_product(examples):
    a, g = (torch.randn(n, n, dtype=torch.float64) for n in (3, 2))
    product = torch.kron(g @ g.mT, a @ a.mT)
    torch.testing.assert_close(pinns.nearest(product, 2, 3), product)


def test_the_forward_laplacian_has_the_gradients_of_its_residual(examples):
    """One output and one layer behind its input: the sum over positions is per-point exact, so the
    dense block beside ours is that of the same residual."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    x = torch.rand(1, 2)
    found = pinns.forward_laplacian(model, x)
    z = x.clone().requires_grad_()
    race = examples("pinn_race")
    du = race.derivative(model(z), z)
    laplacian = sum(race.derivative(du[:, i], z)[:, i] for i in range(2))
    (dw,) = torch.autograd.grad(laplacian.sum(), model[2].weight)
    # Of the last layer, only the Laplacian has a gradient: G = 2, A the mean over its positions.
    assert found["2"].shape == (4, 4)
    t, w = (x @ model[0].weight.mT + model[0].bias).tanh(), model[0].weight
    right = -2 * t * (1 - t**2) * w.square().sum(1)
    torch.testing.assert_close(dw, right)
    value, first = torch.cat([t[0], torch.ones(1)]), (1 - t.mT**2) * w
    inputs = torch.stack([value, *(torch.cat([f, torch.zeros(1)]) for f in first.mT)])
    inputs = torch.cat([inputs, torch.cat([right[0], torch.zeros(1)]).unsqueeze(0)])
    torch.testing.assert_close(found["2"], 2 * inputs.mT @ inputs / 4)
