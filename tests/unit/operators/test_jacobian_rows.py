"""Rows that are kept as inputs and gradients are those that are written out."""

import pytest
import torch

from dense_matrices import network
from natgrad import operators as ops
from natgrad.operators.jacobian_rows import Explicit, Factored, JacobianRows
from oracles import close
from unit.operators.small_problems import known, randn
from unit.operators.test_outer import Twice, plain, ready

N, Q = 4, 3


def factored(groups, positions, rows, cols, start=0):
    """With what it stands for, `[n, q, groups * cols * rows]`, by a loop."""
    a = randn(groups, N, positions, cols)
    g = randn(N, Q, groups, positions, rows)
    written = torch.zeros(N, Q, groups, cols, rows, dtype=torch.float64)
    for n in range(N):
        for q in range(Q):
            for b in range(groups):
                for s in range(positions):
                    written[n, q, b] += torch.outer(a[b, n, s], g[n, q, b, s])
    size = groups * rows * cols
    index = start + torch.randperm(size)
    part = Factored(a.flatten(1, 2), g.flatten(2), index, groups, rows)
    return part, written.flatten(2)


def explicit(size, start=0):
    values = randn(N, Q, size)
    return Explicit(values, start + torch.randperm(size)), values


SHAPES = [(1, 1, 2, 3), (1, 4, 2, 3), (2, 1, 2, 3), (3, 2, 1, 2), (1, 3, 3, 1)]


@pytest.mark.parametrize("shape", [*SHAPES, None], ids=str)
def test_parts(shape):
    part, written = factored(*shape) if shape else explicit(5)
    size = written.shape[2]
    matrix = torch.zeros(N, Q, size, dtype=torch.float64)
    matrix[:, :, part.index] = written
    v, u = randn(size, 2), randn(N, Q, 2)
    assert close(part.explicit(), written)
    assert close(part.forward(v), matrix @ v)
    out = randn(size, 2)
    expected = out + torch.einsum("nqp,nqk->pk", matrix, u)
    part.backward(u, out)
    assert close(out, expected)
    flat = matrix.flatten(0, 1)
    assert close(part.gram(part), flat @ flat.T)


@pytest.mark.parametrize("shared", [False, True])
def test_together(shared):
    """Several layers, or several uses of one."""
    one, first = factored(1, 2, 2, 3)
    two, second = factored(2, 1, 1, 3, start=0 if shared else 6)
    three, third = explicit(6, start=0 if shared else 12)
    size = 6 if shared else 18
    matrix = torch.zeros(N, Q, size, dtype=torch.float64)
    for part, written in ((one, first), (two, second), (three, third)):
        matrix[:, :, part.index] += written
    rows = JacobianRows([one, two, three], N, Q, size, shared)
    v, u, out = randn(size, 2), randn(N, Q, 2), torch.zeros(size, 2, dtype=torch.float64)
    flat = matrix.flatten(0, 1)
    assert close(rows.forward(v), matrix @ v)
    rows.backward(u, out)
    assert close(out, flat.T @ u.flatten(0, 1))
    assert close(rows.explicit(), flat)
    assert close(rows.gram(rows), flat @ flat.T)
    assert rows.numel == sum(
        p.a.numel() + p.g.numel() if isinstance(p, Factored) else p.values.numel()
        for p in rows.parts
    )


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_of_a_model(name):
    """Shared inputs are kept apart from gradients; norm layers and embeddings are written out."""
    dense = network(name)
    loss = known("sequence" if name == "transformer" else "classes").loss
    (rows,) = ops.ggn(dense.model, loss, (*dense.inputs, dense.targets))._kept_rows()
    kinds = [type(part) for part in rows.parts]
    assert kinds.count(Factored) == (3 if name == "cnn" else 10)
    assert kinds.count(Explicit) == (1 if name == "cnn" else 8)
    assert rows.shared == (name == "transformer")  # whose head is tied


def test_a_layer_that_is_called_twice():
    x, y = plain()
    (rows,) = ops.ggn(ready(Twice()), known("classes").loss, (x, y))._kept_rows()
    assert len(rows.parts) == 3
    assert rows.shared
