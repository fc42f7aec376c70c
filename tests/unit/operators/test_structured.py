"""Layer by layer: what is in the contract holds for other losses, cuts and choices too."""

import pytest
import torch
import torch.nn.functional as F

from dense_matrices import Dense, network, ready, uneven
from natgrad import EKFAC, Diagonal, EmpiricalFisher, Full, Kronecker, MonteCarloFisher, UnitWise
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import CoverageError, SettingError
from natgrad.operators import Problem, vectors
from natgrad.operators.vectors import Draws
from oracles import close
from unit.operators.small_problems import CASES, case, known, randn, says
from unit.operators.test_outer import Bare, Functional, Positions, TiedBias, Twice, indices, plain

STRUCTURES = [Full(), UnitWise(), Diagonal(), Kronecker(), Kronecker("reduce"), EKFAC()]


def expected(dense, kind, structure):
    matrix = getattr(dense, kind)
    if isinstance(structure, Kronecker):
        return dense.kronecker(kind, structure.sharing)
    if isinstance(structure, EKFAC):
        return dense.ekfac(kind)
    keep = {Full: dense.full, UnitWise: dense.unit_wise, Diagonal: dense.diagonal}
    return keep[type(structure)](matrix)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_losses(name, structure):
    """Three batches of different sizes are one, whatever the samples weigh."""
    own = known(name)
    for problem in (own.problem(), Problem(own.model, own.loss, (own.x, own.y))):
        g = ops.ggn(problem, structure=structure)
        assert close(g.dense(), expected(own.dense, "G", structure))
    c = ops.fisher(own.problem(), structure=structure, curvature=EmpiricalFisher())
    assert close(c.dense(), expected(own.dense, "C", structure))


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_vectors_some_at_a_time(structure, monkeypatch):
    own = known("weighted sequence")
    monkeypatch.setattr(vectors, "_NUMBERS", 1)
    g = ops.ggn(own.problem(), structure=structure)
    assert close(g.dense(), expected(own.dense, "G", structure))


@pytest.mark.parametrize("structure", [Full(), UnitWise(), Diagonal()], ids=repr)
def test_a_layer_that_is_called_twice(structure):
    x, y = plain()
    dense = Dense(ready(Twice()), F.cross_entropy, (x,), y)
    g = ops.ggn(dense.model, F.cross_entropy, uneven(x, y, (2, 3)), structure=structure)
    assert close(g.dense(), expected(dense, "G", structure))


class Drawn(Dense):
    """The same draws as natgrad's, in place of the roots of the output's Hessian."""

    def vectors(self, kind):
        return self.draws

    @property
    def G(self):  # noqa: N802
        rows = [torch.einsum("nd,ndp->np", v.flatten(1), self.jacobian) for v in self.draws]
        return sum(one.T @ one for one in rows) / self.n


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", ["classes", "weighted sequence", "square"])
def test_drawn_targets(name, structure):
    own = known(name)
    problem = Problem(own.model, own.loss, (own.x, own.y))
    (batch,) = problem.batches()
    (stack,) = Draws(2, 3).stacks(problem.loss, own.dense.f, batch, 0)
    dense = Drawn(own.model, own.mean, (own.x,), own.y)
    dense.__dict__["draws"] = list(stack * (problem.samples / problem.weight) ** 0.5)
    curvature = MonteCarloFisher(2, seed=3)
    for _ in range(2):  # the same ones again
        found = ops.fisher(problem, structure=structure, curvature=curvature)
        assert close(found.dense(), expected(dense, "G", structure))


def test_one_structure_for_each_layer():
    dense = network("cnn")
    chosen = {"0": Kronecker(), "1": Diagonal(), "3": EKFAC(), "7": Full()}
    g = ops.ggn(
        dense.model,
        F.cross_entropy,
        uneven(*dense.inputs, dense.targets),
        structure=lambda layer: chosen[layer.name],
    )
    for name, structure in chosen.items():
        where = dense.layers[name].flatten()
        block = expected(dense, "G", structure)[where][:, where]
        assert close(g.dense()[where][:, where], block)
        assert g.blocks[name].structure == structure
    assert "Kronecker" in repr(g)
    assert "131 parameters" in repr(g)


def test_passes_over_the_data():
    """One; a second for eigenvalues in the basis of the first."""
    own, seen = case("classes"), []
    problem = own.problem()
    ops.ggn(problem, structure=Full())  # which looks at what layers show
    own.model.register_forward_hook(lambda *_: seen.append(1))
    for structure, passes in ((Kronecker(), 1), (Full(), 1), (EKFAC(), 2)):
        seen.clear()
        ops.ggn(problem, structure=structure)
        assert len(seen) == passes * len(own.cut)


def test_parameters_that_change_later():
    """A structure is of the parameters as they were."""
    own = case("classes")
    g = ops.ggn(own.problem(), structure=Kronecker())
    before = g.dense()
    with torch.no_grad():
        own.model[0].weight.mul_(2)
    assert torch.equal(g.dense(), before)


def test_eigenvectors_of_single_blocks():
    """More of them than a block has."""
    own = known("classes")
    g = ops.ggn(own.problem(), structure=Kronecker())
    found = g.eigenvalues(g.size)
    assert close(found.vectors.T @ found.vectors, torch.eye(g.size, dtype=torch.float64))
    assert close(found.vectors * found.values @ found.vectors.T, g.dense())
    assert found.products == 0


class TestFunctions:
    def test_singular(self):
        g = ops.ggn(known("classes").problem(), structure=Full())
        message = (
            "GGN is singular, so it cannot be inverted without damping: give a damping above 0."
        )
        v = randn(g.size)
        says(SettingError, message, g.solve, v)
        says(SettingError, message, g.power, v, -0.5)
        assert close(g.power(g.power(v, 0.5), 0.5), g @ v)

    def test_negative(self):
        own = known("classes")
        h = ops.hessian(own.problem(), structure=Full())
        lowest = float(torch.linalg.eigvalsh(own.dense.full(own.dense.H))[0])
        assert lowest < -0.01
        says(
            SettingError,
            f"Hessian with damping 0.001 has the eigenvalue {lowest + 0.001:.3g}, so its "
            "determinant has no logarithm: give a larger damping.",
            h.logdet,
            0.001,
        )
        with pytest.raises(SettingError, match=r"of which there is no power 0.5: give a larger"):
            h.power(randn(h.size), 0.5, 0.001)


class TestMessages:
    @pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
    @pytest.mark.parametrize("make", [ops.ggn, ops.hessian])
    def test_parameters_of_no_layer(self, make, structure):
        says(
            CoverageError,
            "Parameter 'scale' has no block (no layer is registered for Bare), nor have 1 others: "
            "leave such parameters out with parameters=[...], or take structure=None.",
            lambda: make(ready(Bare()), F.cross_entropy, plain(), structure=structure),
        )
        found = make(
            ready(Bare()), F.cross_entropy, plain(), structure=structure, parameters="layer.*"
        )
        assert list(found.blocks) == ["layer"]

    def test_a_bias_of_a_tied_weight(self):
        says(
            CoverageError,
            "Parameter 'head.bias' has no block (a bias of a tied weight): leave such parameters "
            "out with parameters=[...], or take structure=None.",
            lambda: ops.ggn(ready(TiedBias()), F.cross_entropy, indices(5), structure=Full()),
        )

    @pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
    def test_inputs_that_samples_share(self, structure):
        says(
            CoverageError,
            "The gradients of 5 samples cannot be told apart in Embedding 'places', which has one "
            "input for several of them, or after which the model mixes them: give it an input for "
            "every sample, leave it out with parameters=[...], or take structure=None.",
            lambda: ops.ggn(
                ready(Positions()), F.cross_entropy, indices(5, 3), structure=structure
            ),
        )

    def test_a_weight_without_its_layer(self):
        says(
            CoverageError,
            "The weight of Linear 'layer' has more to do with the output than calls of that layer "
            "show: call the layer wherever its weight is used, leave it out with parameters=[...], "
            "or take structure=None.",
            lambda: ops.ggn(ready(Functional()), F.cross_entropy, plain(), structure=Kronecker()),
        )


def test_transformer_with_a_tied_head_and_drawn_targets():
    """Uses of both kinds are seen for every drawn target."""
    dense = network("transformer")
    data = uneven(*dense.inputs, dense.targets)
    problem = Problem(dense.model, CrossEntropy(class_axis=-1), data)
    curvature = MonteCarloFisher(2, seed=3)
    whole = ops.fisher(problem, curvature=curvature).dense()
    for structure in (Full(), UnitWise(), Diagonal()):
        found = ops.fisher(problem, curvature=curvature, structure=structure)
        keep = {Full: dense.full, UnitWise: dense.unit_wise, Diagonal: dense.diagonal}
        assert close(found.dense(), keep[type(structure)](whole))
