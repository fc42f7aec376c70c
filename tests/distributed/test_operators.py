"""Matrices of data that are spread over processes are those of one process with all of them."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dense_matrices import Dense, network
from natgrad import EKFAC, Diagonal, EmpiricalFisher, Full, Kronecker, MonteCarloFisher, UnitWise
from natgrad import operators as ops
from natgrad.curvature.losses import CrossEntropy
from natgrad.errors import CoverageError
from natgrad.operators import Problem, outer
from oracles import close
from unit.operators.small_problems import case
from unit.operators.test_outer import Positions, indices

NAMES = ("mlp", "cnn", "transformer")
STRUCTURES = (Full(), UnitWise(), Diagonal(), Kronecker(), Kronecker("reduce"), EKFAC())
SHARDS = {2: ([(1,), (3, 2)]), 3: ([(2,), (1, 1), (2,)])}  # batches of each rank


def loss_of(name):
    return CrossEntropy(class_axis=-1) if name == "transformer" else F.cross_entropy


def shard(x, y):
    """This rank's batches."""
    shards = SHARDS[dist.get_world_size()]
    rank = dist.get_rank()
    start = sum(sum(one) for one in shards[:rank])
    count = sum(shards[rank])
    mine = (t[start : start + count].split(shards[rank]) for t in (x, y))
    return list(zip(*mine, strict=True))


def matrices_on_ranks(name):
    """Everything this rank has to say about a network's matrices."""
    dense = network(name)
    problem = Problem(dense.model, loss_of(name), shard(*dense.inputs, dense.targets))
    h, g = ops.hessian(problem), ops.ggn(problem)
    c = ops.fisher(problem, curvature=EmpiricalFisher())
    v = torch.randn(dense.size, 2, generator=torch.Generator().manual_seed(0)).double()
    found = {
        "samples": problem.samples,
        "weight": problem.weight,
        "value": problem.value(),
        "gradient": problem.gradient(),
    }
    for kind, operator in (("H", h), ("G", g), ("C", c)):
        found[kind] = {
            "product": operator @ v,
            "dense": operator.dense(),
            "diagonal": operator.diagonal(),
            "norm": float(operator.norm()),
            "eigenvalues": operator.exact_eigenvalues(),
            "logdet": float(operator.logdet(damping=5.0)),
        }
    for structure in structures_of(name):
        found["G", repr(structure)] = ops.ggn(problem, structure=structure).dense()
        c = ops.fisher(problem, structure=structure, curvature=EmpiricalFisher())
        found["C", repr(structure)] = c.dense()
        if name != "transformer":  # whose tied weight has no Kronecker factors of its Hessian
            found["H", repr(structure)] = ops.hessian(problem, structure=structure).dense()
    return found


def structures_of(name):
    return STRUCTURES if name == "mlp" else (Kronecker(), EKFAC())


def expected(dense, kind, structure):
    if isinstance(structure, Kronecker):
        return dense.kronecker(kind, structure.sharing)
    if isinstance(structure, EKFAC):
        return dense.ekfac(kind)
    keep = {Full: dense.full, UnitWise: dense.unit_wise, Diagonal: dense.diagonal}
    return keep[type(structure)](getattr(dense, kind))


@pytest.mark.parametrize(("name", "ranks"), [("mlp", 3), ("cnn", 2), ("transformer", 2)])
def test_matrices_of_one_process(world, name, ranks):
    dense = network(name)
    v = torch.randn(dense.size, 2, generator=torch.Generator().manual_seed(0)).double()
    for found in world.run(matrices_on_ranks, name, ranks=ranks):
        assert found["samples"] == dense.n
        assert found["weight"] == dense.targets.numel()
        assert found["value"] == pytest.approx(float(dense.loss(dense.theta)), rel=1e-12)
        assert close(found["gradient"], dense.gradient)
        for kind in "HGC":
            truth, own = getattr(dense, kind), found[kind]
            values = torch.linalg.eigvalsh(truth).flip(0)
            assert close(own["product"], truth @ v)
            assert close(own["dense"], truth)
            assert close(own["diagonal"], truth.diagonal())
            assert own["norm"] == pytest.approx(float(truth.norm()), rel=1e-9)
            assert close(own["eigenvalues"], values)
            logdet = float((values + 5).log().sum())
            assert own["logdet"] == pytest.approx(logdet, rel=1e-9)
            for structure in structures_of(name):
                if kind != "H" or name != "transformer":
                    block = found[kind, repr(structure)]
                    assert close(block, expected(dense, kind, structure))


def weighted_on_ranks():
    own = case("weighted sequence")
    problem = Problem(own.model, own.loss, shard(own.x, own.y))
    c = ops.fisher(problem, curvature=EmpiricalFisher())
    return problem.weight, ops.hessian(problem).dense(), ops.ggn(problem).dense(), c.dense()


def test_weights_of_targets(world):
    """Where ranks have different weights, none of them the number of samples."""
    own = case("weighted sequence")
    for weight, h, g, c in world.run(weighted_on_ranks, ranks=2):
        assert weight not in (own.y.numel(), len(own.y))
        assert close(h, own.dense.H)
        assert close(g, own.dense.G)
        assert close(c, own.dense.C)


def traffic_on_ranks():
    """Reductions of each call, once sizes are known."""
    dense = network("mlp")
    data = shard(*dense.inputs, dense.targets)
    problem = Problem(dense.model, F.cross_entropy, data)
    v = torch.ones(dense.size, 5, dtype=torch.float64)
    counts = {}

    def count(what, call):
        before = problem.comm.traffic.snapshot()
        call()
        counts[what] = (problem.comm.traffic - before).calls

    count("sizes", lambda: problem.weight)
    h, g = ops.hessian(problem), ops.ggn(problem)
    for kind, operator in (("H", h), ("G", g)):
        count(f"{kind} @ v", lambda o=operator: o @ v)
        count(f"{kind} @ v again", lambda o=operator: o @ v)
    count("value", problem.value)
    count("gradient", problem.gradient)
    count("dense", g.dense)
    for structure in STRUCTURES:
        count(repr(structure), lambda s=structure: ops.ggn(problem, structure=s))
    return counts


def test_one_reduction_a_pass(world):
    """EKFAC has a second pass, in the basis of the first."""
    for counts in world.run(traffic_on_ranks, ranks=2):
        for what, calls in counts.items():
            assert calls == {"curvature": 2 if what == "EKFAC()" else 1}, what


def ways_on_ranks():
    """The first rank keeps rows and the second runs the model, as if its shard were too large."""
    dense = network("mlp")
    data = shard(*dense.inputs, dense.targets)
    outer._KEPT = 0 if dist.get_rank() else 1 << 28
    g = ops.ggn(dense.model, F.cross_entropy, data)
    v = torch.linspace(-1, 1, dense.size, dtype=torch.float64)
    return g._kept_rows() is not None, g @ v, float(g.trace()), dense.G @ v


def test_ranks_may_go_different_ways(world):
    """They still add up the same things in the same order."""
    dense = network("mlp")
    found = world.run(ways_on_ranks, ranks=2)
    assert [kept for kept, *_ in found] == [True, False]
    for _, product, trace, truth in found:
        assert close(product, truth)
        assert trace == pytest.approx(float(dense.G.trace()), rel=1e-9)


def drawn_on_ranks():
    dense = network("mlp")
    problem = Problem(dense.model, F.cross_entropy, shard(*dense.inputs, dense.targets))
    return ops.fisher(problem, curvature=MonteCarloFisher(400)).dense()


def test_drawn_targets(world):
    """All ranks have the same matrix, made of draws that are not the same."""
    one, two = world.run(drawn_on_ranks, ranks=2)
    assert torch.equal(one, two)
    assert close(one, network("mlp").G, 0.2)


def unseen_on_ranks():
    """Rank 0 has one sample, which shows nothing."""
    torch.manual_seed(0)
    model, (x, y) = Positions().double(), indices(6, 3)
    problem = Problem(model, F.cross_entropy, shard(x, y))
    g, dense = ops.ggn(problem), Dense(model, F.cross_entropy, (x,), y)
    v = torch.ones(g.size, dtype=torch.float64)
    with pytest.raises(CoverageError, match="cannot be told apart in Embedding 'places'"):
        ops.ggn(problem, structure=Kronecker())
    return g @ v, dense.G @ v


def test_what_one_rank_sees_all_know(world):
    for found, truth in world.run(unseen_on_ranks, ranks=2):
        assert close(found, truth)


def wrapped_on_ranks():
    dense = network("mlp")
    model = nn.parallel.DistributedDataParallel(dense.model).train()
    problem = Problem(model, F.cross_entropy, shard(*dense.inputs, dense.targets))
    v = torch.ones(dense.size, dtype=torch.float64)
    k = ops.ggn(problem, structure=Kronecker()) @ v
    return ops.hessian(problem) @ v, ops.ggn(problem) @ v, k, problem.gradient()


def test_a_model_in_data_parallel(world):
    dense = network("mlp")
    v = torch.ones(dense.size, dtype=torch.float64)
    for h, g, k, gradient in world.run(wrapped_on_ranks, ranks=2):
        assert close(h, dense.H @ v)
        assert close(g, dense.G @ v)
        assert close(k, dense.kronecker("G", "expand") @ v)
        assert close(gradient, dense.gradient)


def uneven_to_the_end(part):
    """Two ranks, of which the second has no data, or bad ones."""
    dense = network("mlp")
    data = [(*dense.inputs, dense.targets)]
    if dist.get_rank() == 1:
        data = {"none": [], "bad": [(*dense.inputs, dense.targets[:1])]}[part]
    try:
        problem = Problem(dense.model, F.cross_entropy, data)
    except Exception as error:
        return type(error).__name__, str(error)
    v = torch.ones(dense.size, dtype=torch.float64)
    found = [ops.hessian(problem) @ v, ops.ggn(problem) @ v]
    found += [ops.ggn(problem, structure=s) @ v for s in (Kronecker(), EKFAC(), Diagonal())]
    return [problem.gradient(), *found, ops.ggn(problem).eigenvalues(2).values]


def test_a_rank_without_data(world):
    one, two = world.run(uneven_to_the_end, "none", ranks=2)
    (alone,) = world.run(uneven_to_the_end, "none", ranks=1)
    for mine, theirs, truth in zip(one, two, alone, strict=True):
        assert torch.equal(mine, theirs)
        assert close(mine, truth)


def test_bad_data_on_one_rank_are_told_to_all(world):
    (_, here), (_, there) = world.run(uneven_to_the_end, "bad", ranks=2)
    assert here == f"Problem could not be made on rank 1: {there}"
