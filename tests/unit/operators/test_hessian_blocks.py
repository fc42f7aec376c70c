"""The Hessian layer by layer; its values are in the contract."""

import pytest
import torch.nn.functional as F
from torch import nn

from dense_matrices import Dense, HessianFactors, Transformer, network, ready, sentences, uneven
from natgrad import EKFAC, Diagonal, Full, Kronecker, UnitWise
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import CoverageError
from natgrad.operators import hessian_blocks
from oracles import close
from unit.operators.small_problems import case, known, randn, says
from unit.operators.test_outer import Functional, TiedBias, Twice, indices, plain


@pytest.mark.parametrize("structure", [Full(), UnitWise(), Diagonal(), EKFAC()], ids=repr)
def test_some_columns_at_a_time(structure, monkeypatch):
    own = known("classes")
    expected = ops.hessian(own.problem(), structure=structure).dense()
    monkeypatch.setattr(hessian_blocks, "_COLUMNS", 7 * own.dense.size)
    assert close(ops.hessian(own.problem(), structure=structure).dense(), expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["weighted sequence", "pixels", "weighted", "square", "own"])
def test_kronecker_factors_of_other_losses(name, sharing):
    """Of three batches, where samples weigh what they do."""
    own = case(name)
    dense = HessianFactors(own.model, own.mean, (own.x,), own.y)
    found = ops.hessian(own.problem(), structure=Kronecker(sharing))
    assert close(found.dense(), dense.kronecker("H", sharing))


def test_one_sample():
    """Its Kronecker product is the block itself."""
    own = case("classes")
    x, y = own.x[:1], own.y[:1]
    dense = Dense(own.model, own.mean, (x,), y)
    found = ops.hessian(own.model, own.loss, (x, y), structure=Kronecker())
    assert close(found.dense(), dense.full(dense.H))


def test_a_structure_for_each_layer():
    own = known("classes")
    kinds = {"0": Diagonal(), "2": Full(), "4": Kronecker()}
    found = ops.hessian(own.problem(), structure=lambda layer: kinds[layer.name])
    dense = HessianFactors(own.model, own.mean, (own.x,), own.y)
    expected = dense.kronecker("H", "expand")
    for name, index in dense.layers.items():
        where = index.flatten()
        if name != "4":
            block = dense.H[where][:, where]
            expected[where[:, None], where] = block if name == "2" else block.diagonal().diag()
    assert close(found.dense(), expected)
    assert [placed.structure for placed in found.blocks.values()] == list(kinds.values())


@pytest.mark.parametrize("structure", [Full(), UnitWise(), Diagonal()], ids=repr)
@pytest.mark.parametrize(
    ("build", "data"), [(Twice, plain), (Functional, plain)], ids=["twice", "functional"]
)
def test_entries_of_a_weight_that_is_used_twice(build, data, structure):
    """They come from products, which see all uses."""
    x, y = data()
    dense = Dense(ready(build()), F.cross_entropy, (x,), y)
    found = ops.hessian(dense.model, F.cross_entropy, uneven(x, y, (2, 3)), structure=structure)
    keep = {Full: dense.full, UnitWise: dense.unit_wise, Diagonal: dense.diagonal}
    assert close(found.dense(), keep[type(structure)](dense.H))


def test_the_parameters_of_frozen_layers_are_left_out():
    own = case("classes")
    own.model[0].requires_grad_(False)
    dense = HessianFactors(own.model, own.mean, (own.x,), own.y)
    found = ops.hessian(own.model, own.loss, own.cut, structure=Kronecker())
    assert list(found.blocks) == ["2", "4"]
    assert close(found.dense(), dense.kronecker("H", "expand"))
    found = ops.hessian(own.model, own.loss, own.cut, structure=Full(), parameters="4.weight")
    assert found.shape == (12, 12)


def test_untied_transformer():
    """Whose embeddings have Kronecker factors of their Hessian, with a diagonal A."""
    model, (x, y) = Transformer(), sentences(4)
    model.head = nn.Linear(4, Transformer.entries)
    dense = HessianFactors(ready(model), lambda f, y: F.cross_entropy(f.mT, y), (x,), y)
    data = uneven(x, y, (1, 3))
    found = ops.hessian(dense.model, CrossEntropy(class_axis=-1), data, structure=Kronecker())
    assert close(found.dense(), dense.kronecker("H", "expand"))


class TestMessages:
    @pytest.mark.parametrize("structure", [Kronecker(), Kronecker("reduce"), EKFAC()], ids=repr)
    @pytest.mark.parametrize(
        ("name", "build"), [("again", Twice), ("embedding", Transformer)], ids=["twice", "tied"]
    )
    def test_a_weight_that_is_used_twice(self, name, build, structure):
        tied = build is Transformer
        loss = CrossEntropy(class_axis=-1) if tied else F.cross_entropy
        says(
            CoverageError,
            f"The weight of {name!r} is used several times, so the Hessian of its output is not "
            "that of one call: take Full(), UnitWise() or Diagonal() for it.",
            lambda: ops.hessian(
                ready(build()), loss, sentences(3) if tied else plain(), structure=structure
            ),
        )

    def test_an_unknown_structure(self):
        class Own(UnitWise):
            pass

        own = known("classes")
        says(
            CoverageError,
            f"The Hessian has no form for {Own()!r}: take Full(), UnitWise(), Diagonal(), "
            "Kronecker() or EKFAC().",
            lambda: ops.hessian(own.problem(), structure=Own()),
        )

    def test_too_large_a_block(self):
        own = known("classes")
        with pytest.raises(CoverageError, match=r"above the limit of 10 parameters"):
            ops.hessian(own.problem(), structure=Full(limit=10))

    def test_a_bias_of_a_tied_weight(self):
        says(
            CoverageError,
            "Parameter 'head.bias' has no block (a bias of a tied weight): leave such parameters "
            "out with parameters=[...], or take structure=None.",
            lambda: ops.hessian(
                ready(TiedBias()), F.cross_entropy, indices(5), structure=Diagonal()
            ),
        )

    def test_a_weight_without_its_layer(self):
        """Which Kronecker factors would miss."""
        with pytest.raises(CoverageError, match=r"than calls of that layer show"):
            ops.hessian(ready(Functional()), F.cross_entropy, plain(), structure=Kronecker())


def test_products_are_those_of_entries():
    dense = network("cnn")
    found = ops.hessian(dense.model, F.cross_entropy, (*dense.inputs, dense.targets))
    v = randn(found.size)
    blocks = ops.hessian(found.problem, structure=Full())
    assert close(blocks @ v, dense.full(dense.H) @ v)
