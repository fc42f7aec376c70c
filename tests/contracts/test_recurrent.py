"""Statistics of recurrent modules are those of a loop over samples and time steps."""

from collections import defaultdict

import pytest
import torch
from torch import nn

import natgrad
from recurrent_cases import (
    CELLS,
    DAMPING,
    HIDDEN,
    INPUTS,
    KINDS,
    LENGTHS,
    SAMPLES,
    STRUCTURES,
    Loop,
    Net,
    batch,
    dense,
    expected,
    factor,
    make,
    matrix,
    oracle,
    outer,
    sample_loss,
    sequences,
    step,
)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.pairs
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chosen",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}],
    ids=["plain", "deep", "no_bias"],
)
def test_blocks_are_those_of_a_loop_over_samples(kind, structure, packed, chosen):
    rnn = make(kind, **chosen)
    x = sequences() if packed else batch()
    pairs = oracle(rnn, x)
    kfac, raw = step(Net(rnn), x, structure=STRUCTURES[structure])
    assert {b.name for b in kfac.blocks} == {f"rnn.{name}" for name in pairs}
    for block in kfac.blocks:
        want = expected(pairs[block.name.removeprefix("rnn.")], structure)
        torch.testing.assert_close(dense(block), want, rtol=1e-9, atol=1e-11)
        g = matrix(block, lambda p: raw[id(p)])
        solved = torch.linalg.solve(want + DAMPING * torch.eye(len(want)), g.flatten())
        got = matrix(block, lambda p: p.grad).flatten()
        torch.testing.assert_close(got, solved, rtol=1e-9, atol=1e-9 * float(solved.abs().max()))


def sample_gradients(net, samples):
    """By parameter, ``[n, ...]``: each sample alone through the fused function."""
    rows = defaultdict(list)
    for xs in samples:
        net.zero_grad()
        sum(sample_loss(out) for out in net(*xs)).backward()
        for name, p in net.named_parameters():
            rows[name].append(p.grad.clone())
    net.zero_grad()
    return {name: torch.stack(g) for name, g in rows.items()}


def full_block(grads, block, net):
    names = {id(p): name for name, p in net.named_parameters()}
    whole = [grads[names[id(p)]].reshape(SAMPLES, block.shape[1], -1) for p in block.parameters]
    rows = torch.cat(whole, -1).flatten(1)
    return rows.T @ rows / SAMPLES


@pytest.mark.parametrize("kind", CELLS)
def test_full_blocks_of_a_cell_take_its_calls_together(kind):
    cls, own = CELLS[kind]
    net, x = Loop(cls(INPUTS, HIDDEN, **own)), batch()
    grads = sample_gradients(net, [(x[n : n + 1],) for n in range(SAMPLES)])
    kfac, _ = step(net, x, structure=natgrad.Full())
    assert [b.name for b in kfac.blocks] == ["cell.ih", "cell.hh"]
    for block in kfac.blocks:
        torch.testing.assert_close(
            dense(block), full_block(grads, block, net), rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("structure", ["expand", "reduce"])
def test_a_cell_in_a_loop_is_a_sequence(kind, structure):
    rnn, x = make(kind), batch()
    cls, own = CELLS[kind]
    cell = cls(INPUTS, HIDDEN, **own)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in rnn.state_dict().items()})
    one, _ = step(Net(rnn), x, structure=STRUCTURES[structure])
    two, _ = step(Loop(cell), x, structure=STRUCTURES[structure])
    for a, b in zip(one.blocks, two.blocks, strict=True):
        torch.testing.assert_close(dense(a), dense(b), rtol=1e-10, atol=1e-12)


def test_samples_of_two_packed_calls_stay_together():
    """Each call sorts its samples by length, so they come in different orders."""
    net = Net(make("gru"))
    one, two = sequences(LENGTHS), sequences(LENGTHS[::-1])
    grads = sample_gradients(net, [([a], [b]) for a, b in zip(one, two, strict=True)])
    kfac, _ = step(net, one, two, structure=natgrad.Full())
    for block in kfac.blocks:
        torch.testing.assert_close(
            dense(block), full_block(grads, block, net), rtol=1e-9, atol=1e-11
        )


class Classifier(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0].mean(1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_fisher(kind, frozen):
    """Also where the gradient of the input projection is only wanted for the hidden one."""
    net, x = Classifier(make(kind, batch_first=True)), batch()
    if frozen:
        net.rnn.weight_ih_l0.requires_grad_(False)
        net.rnn.bias_ih_l0.requires_grad_(False)
    kfac = natgrad.KFAC(
        net,
        kl_clip=None,
        update_every=1,
        structure=natgrad.Full(),
        curvature=natgrad.ExactFisher(),
    )
    out = net(x)
    kfac.observe(out)
    nn.functional.cross_entropy(out, torch.zeros(SAMPLES, dtype=torch.long)).backward()
    kfac.step()
    assert len(kfac.blocks) == (3 if kind == "lstm_proj" else 2) - frozen
    kfac.detach()
    for block in kfac.blocks:
        total = 0
        for n in range(SAMPLES):
            logits = net(x[n : n + 1])[0]
            rows = [torch.autograd.grad(z, block.parameters, retain_graph=True) for z in logits]
            jac = torch.stack(
                [torch.cat([g.reshape(block.shape[1], -1) for g in r], -1).flatten() for r in rows]
            )
            p = logits.softmax(0).detach()
            total = total + jac.T @ (p.diag() - outer(p)) @ jac / SAMPLES
        torch.testing.assert_close(dense(block), total, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_a_frozen_parameter_leaves_the_other_blocks_exact(frozen):
    rnn, x = make("gru"), batch()
    pairs = oracle(rnn, x)
    getattr(rnn, frozen).requires_grad_(False)
    kfac, _ = step(Net(rnn), x)
    assert set(kfac.coverage().uncovered) == {f"rnn.{frozen}"}
    for block in kfac.blocks:
        own = pairs[block.name.removeprefix("rnn.")]
        want = sum(g.T @ g for _, g in own) / SAMPLES
        torch.testing.assert_close(factor(block, "G"), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32(structure):
    torch.set_default_dtype(torch.float32)
    rnn, x = make("lstm_proj", torch.float32, bidirectional=True), sequences(dtype=torch.float32)
    kfac, _ = step(Net(rnn), x, structure=STRUCTURES[structure])
    pairs = oracle(rnn, x)
    for block in kfac.blocks:
        want = expected(pairs[block.name.removeprefix("rnn.")], structure)
        torch.testing.assert_close(dense(block), want, rtol=1e-3, atol=1e-4 * float(want.max()))
