"""What the tables say, against what is there."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import natgrad
from natgrad import KFAC
from natgrad.linalg.workspace import held
from training_loops import CHOICES, MLP, NETS, backward, factors, often, start, train


@pytest.fixture
def no_rich(monkeypatch):
    for name in ("rich", "rich.box", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)


class Mixed(nn.Module):
    """Of every kind: covered, frozen, excluded, without a layer, never used."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.slope = nn.PReLU(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.spare = nn.Linear(2, 2)
        self.head = nn.Linear(4, 3, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.slope(self.norm(self.body(x)))
        return self.head(self.frozen(x)) * self.temperature


class TestCoverage:
    def trained(self):
        model = Mixed()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, exclude=["head"], **often())
        train(model, optimizer, kfac, MLP.batches(1))
        return kfac

    def test_every_parameter_has_a_row(self):
        table = self.trained().coverage()
        assert table.covered == {
            "body.weight": "Kronecker(sharing='expand')",
            "body.bias": "Kronecker(sharing='expand')",
            "norm.weight": "UnitWise()",
            "norm.bias": "UnitWise()",
            "spare.weight": "Kronecker(sharing='expand')",
            "spare.bias": "Kronecker(sharing='expand')",
            "temperature": "Diagonal()",
        }
        assert table.uncovered == {
            "slope.weight": "no layer is registered for PReLU",
            "frozen.weight": "frozen",
            "frozen.bias": "frozen",
            "head.weight": "excluded",
        }
        rows = {row[0]: row[1:] for row in table.rows}
        assert rows["body.weight"] == (
            "4 x 4",
            "Linear",
            "Kronecker(sharing='expand')",
            "preconditioned",
        )
        assert rows["temperature"][:2] == ("1", "Mixed")
        assert rows["spare.bias"][-1] == "no statistics yet"
        assert rows["head.weight"][-1] == "left to the optimizer: excluded"
        assert rows["frozen.weight"][-1] == "frozen"  # and left to nobody
        # 16 + 4, 4 + 4, 4 + 2, 1; of these and 4 + 12 others that are trained.
        assert table.footer == "35 of 51 trained parameters preconditioned (68.6%)"

    def test_a_bias_that_a_tied_head_shares(self):
        """As that of BERT's decoder, which is its head's as well."""

        class Tied(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Embedding(7, 4), nn.Linear(4, 7))
                self.bias = self[1].bias
                self[1].weight = self[0].weight

        table = KFAC(Tied(), kl_clip=None).coverage()
        assert not table.uncovered
        assert table.covered["bias"] == "Diagonal()"

    def test_prints(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "140")
        text = str(self.trained().coverage())
        assert "─" in text
        assert "left to the optimizer: excluded" in text

    def test_prints_without_rich(self, no_rich):
        table = self.trained().coverage()
        assert str(table) == table.plain()
        assert str(table).startswith("Coverage\nparameter ")

    def test_problems_are_counted(self):
        kfac = self.trained()
        kfac.blocks[0].dropped += 2
        kfac.blocks[0].failures = 3
        rows = {row[0]: row[-1] for row in kfac.coverage().rows}
        assert rows["body.bias"] == ("preconditioned, 2 updates dropped, 3 decompositions failed")

    def test_names_of_compiled_models_are_the_user_s(self):
        model = MLP.model()
        model[2] = torch.compile(model[2], backend="eager")
        table = KFAC(model, kl_clip=None).coverage()
        assert list(table.covered) == [f"{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")]


def storage(tensors) -> int:
    """Bytes of the memory behind some tensors, each piece counted once."""
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(pieces.values())


class TestMemory:
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("net", NETS)
    @pytest.mark.parametrize(("structure", "inverse"), CHOICES, ids=str)
    def test_bytes_are_what_the_tensors_take(self, net, structure, inverse, dtype):
        settings = {"structure": structure, "inverse": inverse, "factor_dtype": dtype}
        model, optimizer, kfac = start(NETS[net], **settings)
        train(model, optimizer, kfac, NETS[net].batches(2))
        backward(model, optimizer, kfac, *NETS[net].batch())
        blocks = kfac.blocks
        real = {
            "factors": storage(f.mean for b in blocks for f in b.running.values()),
            "inverses": storage(p for b in blocks for ps in b.parts.values() for p in ps),
            "sums": storage(s.kept for b in blocks for s in b.sums.values()),
            "scales": storage(
                value
                for stack in kfac.preconditioning.stacks
                for value in vars(stack.decomposed).values()
                if isinstance(value, Tensor) and value is not vars(stack.decomposed).get("given")
            ),
            "workspace": held() + storage(kfac.preconditioning.buffers),
        }
        assert kfac.memory().total == real
        assert kfac.drift()  # measuring keeps nothing
        assert kfac.memory().total == real

    def test_the_table(self):
        model, optimizer, kfac = start()
        train(model, optimizer, kfac, MLP.batches(1))
        table = kfac.memory()
        assert table.column("block") == ("0", "2", "4")
        # A of block 0 is 5 x 5 and G 6 x 6; each has its vectors and its values.
        assert table.rows[0][1:] == ("244 B", "288 B", "0 B", "532 B")
        assert "damped eigenvalues" in table.footer
        assert "Memory" in str(table)

    def test_nothing_before_the_first_step(self):
        kfac = KFAC(MLP.model(), kl_clip=None)
        total = kfac.memory().total
        assert {k: v for k, v in total.items() if v and k != "workspace"} == {}


class TestTimings:
    def test_stages(self):
        model, optimizer, kfac = start(NETS["cnn"], update_every=2)
        assert kfac.timings().seconds == {}
        train(model, optimizer, kfac, NETS["cnn"].batches(4))
        table = kfac.timings()
        assert table.calls == {"A": 6, "G": 6, "norm": 2, "fold": 2, "refresh": 4, "apply": 4}
        assert set(table.seconds) == set(table.calls)
        assert all(seconds > 0 for seconds in table.seconds.values())
        assert sorted(table.column("stage")) == sorted(table.calls)
        assert table.footer.endswith("in 4 steps, measured on the host")
        assert "Timings" in str(table)

    def test_prints_without_rich(self, no_rich):
        model, optimizer, kfac = start()
        train(model, optimizer, kfac, MLP.batches(1))
        table = kfac.timings()
        assert str(table) == table.plain()


class TestDrift:
    @pytest.mark.parametrize("structure", [natgrad.Kronecker(), natgrad.UnitWise()], ids=str)
    def test_change_of_the_last_update(self, structure):
        """``|new - old| / |old|`` of the running averages (Osawa 2019, eq. 19)."""
        model, optimizer, kfac = start(structure=structure, refresh_every=50)
        train(model, optimizer, kfac, MLP.batches(1))
        assert set(kfac.drift().change.values()) == {0.0}
        for batch in list(MLP.batches(4))[1:]:
            before = {
                (block.name, name): running.mean.double().clone()
                for block in kfac.blocks
                for name, running in block.running.items()
            }
            train(model, optimizer, kfac, [batch])
            change = kfac.drift().change
            assert change.keys() == before.keys()
            for block in kfac.blocks:
                for name, running in block.running.items():
                    old = before[block.name, name]
                    expected = (running.mean.double() - old).norm() / old.norm()
                    assert change[block.name, name] == pytest.approx(float(expected), rel=1e-4)

    def test_error_of_an_old_eigenbasis(self):
        model, optimizer, kfac = start(refresh_every=50)
        train(model, optimizer, kfac, MLP.batches(1))
        assert all(error < 1e-5 for error in kfac.drift().error.values())
        train(model, optimizer, kfac, MLP.batches(3))
        errors = kfac.drift().error
        dense = factors(kfac)
        for block in kfac.blocks:
            for name in "AG":
                q = block.parts[name][0][0]
                rotated = q @ dense[f"{block.name}.{name}"][0] @ q.mT
                beside = rotated - rotated.diagonal().diag()
                expected = beside.norm() / rotated.norm()
                assert errors[block.name, name] == pytest.approx(float(expected), rel=1e-3)
                assert errors[block.name, name] > 1e-3

    def test_error_of_an_old_inverse(self):
        model, optimizer, kfac = start(refresh_every=50, inverse=natgrad.Cholesky())
        train(model, optimizer, kfac, MLP.batches(1))
        assert all(error < 1e-4 for error in kfac.drift().error.values())
        train(model, optimizer, kfac, MLP.batches(3))
        assert all(error > 1e-3 for error in kfac.drift().error.values())

    def test_the_table(self, no_rich):
        model, optimizer, kfac = start(structure=natgrad.EKFAC())
        assert kfac.drift().rows == ()
        train(model, optimizer, kfac, MLP.batches(2))
        table = kfac.drift()
        cells = {row[:2]: row[2:] for row in table.rows}
        assert cells["0", "S"][1] == ""  # S is not decomposed
        assert float(cells["0", "A"][0]) == pytest.approx(table.change["0", "A"], rel=1e-2)
        assert ("0", "S") not in table.error
        assert str(table).startswith("Drift\nblock  factor")
