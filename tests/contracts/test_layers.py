"""Every layer, in every structure, against dense curvature: factors, blocks and solves to 1e-9."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

import oracles
from cases import CASES, EMBEDDING, LINEAR, Case, losses
from kfac_keywords import LOSSES
from natgrad import EKFAC, KFAC, Cholesky, Diagonal, Eigen, Full, Kronecker, MeanLoss, UnitWise
from natgrad.inverses import DecomposedFactor
from natgrad.inverses.decomposed import FactorProduct
from natgrad.kfac import low_rank
from natgrad.structures.ekfac import carry_over
from oracles import close, truth

# torch pads by a copy where the kernel is even.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

DAMPING = 0.1
STRUCTURES = {
    "expand": Kronecker(),
    "reduce": Kronecker(sharing="reduce"),
    "ekfac": EKFAC(),
    "unitwise": UnitWise(),
    "diagonal": Diagonal(),
    "full": Full(),
}
by_name = pytest.mark.parametrize("case", CASES, ids=str)


def stepped(case: Case, n: int, reduction: str, steps: int = 1, **settings):
    """A model and its preconditioner after as many steps on the same weights and data."""
    model = case.model()
    settings = {"refresh_every": 1, "damping": DAMPING, **settings}
    kfac = KFAC(
        model,
        kl_clip=None,
        update_every=1,
        loss=LOSSES[reduction](batch_axis=case.batch_axis),
        **settings,
    )
    for _ in range(steps):
        model.zero_grad()
        each = losses(case, model(*case.data(n)))
        (each.mean() if reduction == "mean" else each.sum()).backward()
        kfac.step(samples=None if case.batched else 1)
    return model, kfac


def gradients(model) -> dict[str, torch.Tensor]:
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def expected_block(expected: oracles.Truth, view: oracles.View, structure) -> torch.Tensor:
    if isinstance(structure, Kronecker):
        return oracles.kronecker_block(*oracles.kronecker(view, expected.n, structure.sharing))
    if isinstance(structure, EKFAC):  # before a batch was seen in the basis
        return oracles.kronecker_block(*oracles.kronecker(view, expected.n, "expand"))
    samples = expected.sample_matrices(view)
    block = oracles.fisher(samples)
    if isinstance(structure, Full):
        return block
    if isinstance(structure, UnitWise):
        return oracles.unit_wise(block, tuple(samples.shape[1:]))
    return block.diagonal().diag()


def weights_of(kfac: KFAC) -> list:
    """All blocks but those of biases that one use of a weight has and others have not."""
    return [block for block in kfac.blocks if not block.layers[0].prefers_diagonal]


def found_block(block) -> torch.Tensor:
    kept = block.kept()
    if isinstance(block.structure, EKFAC):
        kept = {**kept, "S": block.parts["S"][0]}
    return block.structure.dense(kept, block.forms, block.shape)


def settings_of(case: Case) -> list[tuple[int, str]]:
    return [(n, reduction) for n in case.batches for reduction in ("mean", "sum")]


def settings_in_turn(case: Case, choice: int) -> list[tuple[int, str]]:
    """Every number of samples and every reduction; a number meets the other reduction in the next
    case, and with the next of the structures or whatever is chosen."""
    if len(case.batches) == 1:
        return settings_of(case)
    turn = CASES.index(case) + choice
    return [(n, ("mean", "sum")[(index + turn) % 2]) for index, n in enumerate(case.batches)]


def setting_in_turn(case: Case, choice: int) -> tuple[int, str]:
    """One number of samples and one reduction: the next of the pairs in the next case, and with the
    next choice, where the number of samples is always another one."""
    turn, count = CASES.index(case) + choice, len(case.batches)
    return case.batches[turn % count], ("mean", "sum")[(turn + (turn // 2 if count > 1 else 0)) % 2]


def test_every_number_of_samples_meets_every_reduction():
    """In each case with one structure or another, and with each structure in one case or another:
    there the first, or the second, number of samples of a case. And in each case each structure
    meets each number of samples: one with an eigendecomposition, the other with Cholesky, or with
    second moments in the basis of EKFAC."""
    met = {}
    for case in CASES:
        found = [setting_in_turn(case, choice) for choice in range(len(STRUCTURES))]
        assert set(found) == set(settings_of(case)), case
        for choice, (n, reduction) in enumerate(found):
            place = case.batches.index(n), reduction
            met.setdefault((len(case.batches), choice), set()).add(place)
            other, _ = setting_in_turn(case, choice + 1)
            assert {n, other} == set(case.batches), case
    for (count, choice), places in met.items():
        assert places == set(product(range(count), ("mean", "sum"))), choice


def test_factors_meet_every_number_of_samples_and_every_reduction():
    """In each case, with one way to share or the other; and with each way."""
    for case in CASES:
        found = [settings_in_turn(case, choice) for choice in range(2)]
        assert {one for some in found for one in some} == set(settings_of(case)), case
        for some in found:
            assert {n for n, _ in some} == set(case.batches), case
            assert {reduction for _, reduction in some} == {"mean", "sum"}, case


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@by_name
def test_block_and_preconditioned_gradient(case, structure):
    n, reduction = setting_in_turn(case, list(STRUCTURES.values()).index(structure))
    expected = truth(case, n)
    model, kfac = stepped(case, n, reduction, structure=structure)
    assert {block.name for block in weights_of(kfac)} == set(expected.views)
    for block in set(kfac.blocks) - set(weights_of(kfac)):
        rows = expected.per_sample[block.name].flatten(1)
        dense = rows.mT @ rows / expected.n
        dense = dense if isinstance(structure, Full) else dense.diagonal().diag()
        damped = dense + DAMPING * torch.eye(len(dense), dtype=dense.dtype)
        wanted = torch.linalg.solve(damped, rows.mean(0))
        assert close(gradients(model)[block.name], wanted), (block.name, n, reduction)
    for block in weights_of(kfac):
        view, where = expected.views[block.name], (block.name, n, reduction)
        assert isinstance(block.structure, UnitWise if norm(view, structure) else type(structure))
        dense = expected_block(expected, view, block.structure)
        a, g = oracles.term_scale(view, expected.n)
        assert close(found_block(block), dense, scale=a * g), where
        wanted = oracles.solve(dense, DAMPING, expected.mean_matrix(view))
        assert close(view.matrix(gradients(model)), wanted), where


def norm(view: oracles.View, structure) -> bool:
    """Norm layers have no Kronecker factors and get a block per channel instead."""
    return view.elementwise and isinstance(structure, Kronecker | EKFAC)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@by_name
def test_kronecker_factors(case, sharing):
    for n, reduction in settings_in_turn(case, sharing == "reduce"):
        expected = truth(case, n)
        _, kfac = stepped(case, n, reduction, structure=Kronecker(sharing))
        for block in weights_of(kfac):
            view = expected.views[block.name]
            if not view.elementwise:
                A, G = oracles.kronecker(view, expected.n, sharing)
                merged = block.structure.matrices(block.kept(), block.forms)
                a, g = oracles.term_scale(view, expected.n)
                where = (block.name, n, reduction)
                assert close(block.forms["A"].dense(merged["A"]), A, scale=a), where
                assert close(block.forms["G"].dense(merged["G"]), G, scale=g), where


@pytest.mark.parametrize("structure", [s for s in STRUCTURES.values() if s != EKFAC()], ids=repr)
@by_name
def test_cholesky(case, structure):
    # Not the number of samples with which the same structure met an eigendecomposition.
    n, reduction = setting_in_turn(case, list(STRUCTURES.values()).index(structure) + 1)
    expected = truth(case, n)
    model, kfac = stepped(case, n, reduction, structure=structure, inverse=Cholesky())
    for block in weights_of(kfac):
        view = expected.views[block.name]
        mean = expected.mean_matrix(view)
        if isinstance(block.structure, Kronecker):
            factors = oracles.kronecker(view, expected.n, structure.sharing)
            wanted = oracles.solve(oracles.pi_damped(*factors, DAMPING), 0.0, mean)
        else:
            dense = expected_block(expected, view, block.structure)
            wanted = oracles.solve(dense, DAMPING, mean)
        assert close(view.matrix(gradients(model)), wanted), (block.name, n, reduction)


@by_name
def test_ekfac_uses_second_moments_in_the_basis_of_the_last_refresh(case):
    # Not the number of samples of the first step, in which the block of EKFAC was compared above.
    n, reduction = setting_in_turn(case, list(STRUCTURES).index("ekfac") + 1)
    expected = truth(case, n)
    model, kfac = stepped(case, n, reduction, 2, structure=EKFAC(), refresh_every=1000)
    for block in weights_of(kfac):
        view = expected.views[block.name]
        if view.elementwise:
            continue
        bases = basis(block, *oracles.kronecker(view, expected.n, "expand"))
        turned = torch.einsum(
            "bir,nbij,bjc->nbrc", bases["G"], expected.sample_matrices(view), bases["A"]
        )
        S = turned.square().mean(0)
        mean = torch.einsum("bir,bij,bjc->brc", bases["G"], expected.mean_matrix(view), bases["A"])
        wanted = torch.einsum("bir,brc,bjc->bij", bases["G"], mean / (S + DAMPING), bases["A"])
        where = (block.name, n, reduction)
        assert close(block.parts["S"][0].view_as(S), S), where
        assert close(view.matrix(gradients(model)), wanted), where


def basis(block, A, G) -> dict[str, torch.Tensor]:
    """The block's eigenvectors as columns, after a check that they are those of A and G.

    They are not unique, so the test goes on with the block's own.
    """
    found = {}
    for name, matrix in (("A", A), ("G", G)):
        rows, values = block.inverse.basis_of(block.decomposed_factors()[name])
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
        q = rows.mT if rows.numel() else eye
        assert close(q.mT @ q, eye)
        assert close(q @ torch.diag_embed(values) @ q.mT, matrix)
        found[name] = q
    return found


@by_name
def test_parameters_without_a_block_keep_their_gradient(case):
    n = case.batches[-1]
    expected = truth(case, n)
    model, kfac = stepped(case, n, "mean")
    covered = {id(p) for block in kfac.blocks for p in block.parameters}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in covered:
            assert name in kfac.uncovered
            assert close(p.grad, expected.mean[name])
        assert (p.grad is None) == (not p.requires_grad)


@by_name
def test_load_and_store_are_inverse_to_each_other(case):
    """And `load` puts every entry where the matrix of the oracle has it."""
    expected = truth(case, case.batches[-1])
    model = case.model()
    kfac = KFAC(model, kl_clip=None, loss=MeanLoss(batch_axis=case.batch_axis))
    for block in weights_of(kfac):
        layer = block.layers[0]
        values = {k: torch.randn_like(p) for k, p in model.named_parameters()}
        by_id = {id(p): values[k] for k, p in model.named_parameters()}
        out = torch.full(layer.shape, torch.nan, dtype=torch.float64)
        layer.load(out, lambda p, by_id=by_id: by_id[id(p)])
        assert torch.equal(out, expected.views[block.name].matrix(values))
        stored = {k: v.clone() for k, v in by_id.items()}
        layer.store(out + 1, lambda p, stored=stored: stored[id(p)])
        again = torch.empty_like(out)
        layer.load(again, lambda p, stored=stored: stored[id(p)])
        assert torch.equal(again, out + 1)


@pytest.mark.parametrize("case", [c for c in (*LINEAR, *EMBEDDING) if c.batched], ids=str)
def test_the_loop_over_samples_is_torch_func(case):
    """The oracle's per-sample gradients are those of `torch.func` (Osawa 2019, eq. 3)."""
    n = case.batches[-1]
    found = oracles.vmapped_gradients(case, case.model(), case.data(n))
    for name, rows in truth(case, n).per_sample.items():
        assert close(found[name], rows, 1e-12)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (torch.nn.Linear(3, 2), torch.zeros(2, 0, 3)),
        (torch.nn.Embedding(5, 3), torch.zeros(2, 0, dtype=torch.long)),
        (torch.nn.LayerNorm(3), torch.zeros(2, 0, 3)),
        (torch.nn.RMSNorm(3), torch.zeros(2, 0, 3)),
        (torch.nn.Embedding(5, 3, padding_idx=0), torch.zeros(2, 4, dtype=torch.long)),
    ],
    ids=["linear", "embedding", "layernorm", "rmsnorm", "only-padding"],
)
def test_no_positions_at_all(module, x, structure):
    """A batch of empty sequences adds nothing: the next batch counts as if it were the first."""
    full = torch.ones(2, 3, dtype=torch.long) if not x.is_floating_point() else torch.randn(2, 3, 3)

    def run(*batches):
        net = copy.deepcopy(module)
        kfac = KFAC(net, kl_clip=None, update_every=1, refresh_every=1, structure=structure)
        for batch in batches:
            net.zero_grad()
            net(batch).tanh().sum().div(2).backward()
            kfac.step()
            assert all(torch.isfinite(p.grad).all() for p in net.parameters())
            assert all(int(block.dropped) == 0 for block in kfac.blocks)
        return net, kfac

    net, _ = run(x)
    assert all((p.grad == 0).all() for p in net.parameters())
    run(x, full)


def test_carry_over_is_the_diagonal_in_the_new_basis():
    """`S` of an old basis, as a matrix, seen from the new one."""
    groups, rows, cols = 2, 3, 4

    def factor(d):
        q = torch.linalg.qr(torch.randn(groups, d, d, dtype=torch.float64))[0]
        values = torch.rand(groups, d, dtype=torch.float64)
        return DecomposedFactor(Eigen(), (q.mT.contiguous(), values), d)

    old, new = ({"A": factor(cols), "G": factor(rows)} for _ in range(2))
    S = torch.rand(groups, rows * cols, dtype=torch.float64)
    found = carry_over(S, old, new)
    for k in range(groups):
        before = torch.kron(old["G"].parts[0][k].mT, old["A"].parts[0][k].mT)
        after = torch.kron(new["G"].parts[0][k].mT, new["A"].parts[0][k].mT)
        matrix = before @ S[k].diag() @ before.mT
        assert close(found[k], (after.mT @ matrix @ after).diagonal())
        assert close(found[k].sum(), S[k].sum())


def test_carry_over_with_a_diagonal_factor():
    q = torch.linalg.qr(torch.randn(1, 3, 3, dtype=torch.float64))[0]
    values = torch.rand(1, 4, dtype=torch.float64)
    a = DecomposedFactor(Eigen(), (values,), 4, diagonal=True)
    eye = torch.eye(3, dtype=torch.float64)[None]
    old, new = (
        {"A": a, "G": DecomposedFactor(Eigen(), (rows, values[:, :3]), 3)} for rows in (eye, q.mT)
    )
    S = torch.rand(1, 12, dtype=torch.float64)
    assert close(carry_over(S, old, new).view(3, 4), q[0].mT.square() @ S.view(3, 4))


@pytest.mark.parametrize(
    "name", ["linear-2", "conv2d-groups", "conv2d-correlations", "embedding-2"]
)
def test_ekfac_carries_its_second_moments_to_a_new_basis(monkeypatch, name):
    """A refresh while S is known: S goes on in the new basis, in the average and in the parts."""
    case = next(c for c in CASES if c.name == name)
    model = case.model()
    kfac = KFAC(
        model, kl_clip=None, update_every=1, refresh_every=3, structure=EKFAC(), factor_decay=0.5
    )
    (block,) = kfac.blocks
    seen, install = [], block.install

    def watched(parts, solved, keeps=None):
        kept = block.kept().get("S")
        old = {
            name: replace(factor, parts=tuple(p.clone() for p in factor.parts))
            for name, factor in block.decomposed_factors().items()
        }
        seen.append((None if kept is None else kept.clone(), old))
        return install(parts, solved, keeps)

    monkeypatch.setattr(block, "install", watched)
    for seed in range(4):
        model.zero_grad()
        losses(case, model(*case.data(3, seed))).mean().backward()
        kfac.step()
    (none, empty), (S, old) = seen
    assert none is None
    assert not empty
    new = block.decomposed_factors()
    assert not close(new["G"].parts[0], old["G"].parts[0], 1e-3)
    expected = carry_over(S, old, new)
    assert not close(expected.flatten(), S, 1e-3)
    assert close(block.parts["S"][0], expected)
    assert close(block.running["S"].mean, expected.flatten())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "case", [c for c in LINEAR if "frozen-weight" not in c.name and "conv" not in c.name], ids=str
)
def test_gradients_as_thin_products(monkeypatch, case, sharing):
    """Wide linear layers precondition the two sides of their gradient; here narrow ones do too."""
    monkeypatch.setattr(low_rank, "_WIDE", 0)
    monkeypatch.setattr(low_rank, "_pays", lambda k, block: True)
    monkeypatch.setattr(FactorProduct, "apply", None)  # of a gradient that is not thin
    for n, reduction in settings_of(case):
        expected = truth(case, n)
        chosen = {"structure": Kronecker(sharing), "inverse": Cholesky()}
        model, kfac = stepped(case, n, reduction, **chosen)
        (block,) = kfac.blocks
        view = expected.views[block.name]
        factors = oracles.kronecker(view, expected.n, sharing)
        mean = expected.mean_matrix(view)
        wanted = oracles.solve(oracles.pi_damped(*factors, DAMPING), 0.0, mean)
        assert close(view.matrix(gradients(model)), wanted), (n, reduction)


def test_eigen_is_the_default_inverse():
    case = LINEAR[0]
    model, kfac = stepped(case, 4, "mean")
    assert kfac.blocks[0].inverse == Eigen()
    again, _ = stepped(case, 4, "mean", inverse=Eigen())
    assert torch.equal(gradients(model)["weight"], gradients(again)["weight"])
