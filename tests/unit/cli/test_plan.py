"""`natgrad plan` prints the plan that a run on that many ranks would have."""

import gc
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from kfac_keywords import grouped
from natgrad import KFAC, Auto, Cholesky, CommOpt, Hybrid, MemOpt, ReduceScatter
from natgrad.cli.options import network
from natgrad.comm import launch
from natgrad.lab.models.spreading import Layout, spread
from natgrad.placement import Cluster, simulate
from natgrad.tables import bytes_text, seconds_text

SHARED = "unit.cli.nets:Shared"


def kfac(model, **settings):
    return KFAC(model, kl_clip=None, update_every=10, refresh_every=100, **grouped(**settings))


def real_plan(layout, placement, inverse):
    """On ranks that are really there."""
    model = network(SHARED)()
    if layout == Layout.DDP:
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == Layout.FSDP:
        model = launch.shard(model)
    return kfac(model, placement=placement, inverse=inverse).plan


@pytest.mark.parametrize("placement", [MemOpt(), CommOpt(), ReduceScatter(), Auto()], ids=repr)
@pytest.mark.parametrize("layout", Layout)
def test_the_plan_is_that_of_real_ranks(world, layout, placement):
    blocks, imagined = spread(kfac(network(SHARED).without_weights()), 3, layout)
    plan = placement(blocks, imagined)
    assert world.run(real_plan, layout, placement, None, ranks=3) == [plan] * 3


def test_of_another_inverse_too(world):
    inverse = Cholesky()
    blocks, imagined = spread(
        kfac(network(SHARED).without_weights(), inverse=inverse), 2, Layout.DDP
    )
    plan = MemOpt()(blocks, imagined)
    assert world.run(real_plan, Layout.DDP, MemOpt(), inverse, ranks=2) == [plan] * 2


def rows(text, title):
    """The table under a title, as lists of cells by their first one."""
    lines = text[text.index(title) :].splitlines()
    rule = next(i for i, line in enumerate(lines) if "─" in line or "--" in line)
    found = {}
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        found[cells[0]] = cells[1:]
    return found


def test_all_placements_are_compared(natgrad):
    said = natgrad(
        *("plan", "--network", "resnet20", "--ranks", "4", "--cluster", "1e12,1e9,1e-4"),
        *("--placement", "hybrid", "--fraction", "1/2"),
    )
    assert said.code == 0
    table = rows(said.out, "Placements of resnet20 on 4 ranks, ddp, eigen")
    assert list(table) == ["MemOpt() = ReduceScatter()", "Hybrid(1/2)", "CommOpt()", "Local()"]
    blocks, world = spread(kfac(network("resnet20").without_weights()), 4, Layout.DDP)
    cluster = Cluster(1e12, 1e9, 1e-4)
    best = Auto(cluster=cluster)(blocks, world)
    for name, strategy in (("Hybrid(1/2)", Hybrid(0.5)), ("CommOpt()", CommOpt())):
        plan = strategy(blocks, world)
        times = simulate(plan, cluster)
        step = max(times.update) / 10 + max(times.refresh) / 100 + max(times.apply)
        sent = [plan.sent(rank) for rank in range(4)]
        agreed = [s.agreement.update / 10 + s.agreement.refresh / 100 for s in sent]
        each = [s.factors / 10 + s.inverses / 100 + s.gradients + s.agreement.apply for s in sent]
        cells = table[name]
        assert cells[0] == seconds_text(step)
        assert cells[1:4] == [
            seconds_text(max(t)) for t in (times.update, times.refresh, times.apply)
        ]
        assert cells[4] == bytes_text(max(a + b for a, b in zip(agreed, each, strict=True)))
        assert cells[5] == bytes_text(times.memory)
        notes = ["chosen"] * (name == "Hybrid(1/2)")
        same = plan.strategy.replace("CommOpt()", "Hybrid(1)")
        notes += ["Auto"] * (best.strategy == f"Auto: {same}")
        assert cells[8:] == ([", ".join(notes)] if notes else [])
    # Then the chosen one, in full.
    chosen = Hybrid(0.5)(blocks, world)
    assert f"Plan {chosen.strategy}" in said.out
    ranks = rows(said.out, "\nRanks")
    assert list(ranks) == ["0", "1", "2", "3"]
    assert [cells[0] for cells in ranks.values()] == [
        bytes_text(chosen.memory(rank).factors) for rank in range(4)
    ]


def test_auto_is_marked_and_chosen(natgrad):
    said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--short")
    assert said.code == 0
    marked = {name: cells[-1] for name, cells in rows(said.out, "Placements").items()}
    assert [note for note in marked.values() if "Auto" in note] == ["chosen, Auto"]
    assert "Plan Auto" not in said.out


def test_every_placement_is_planned_and_priced_once(natgrad, monkeypatch):
    made = []

    def counted(plan, *others):
        if plan.world_size > 1:  # that of KFAC itself does not count
            made.append(plan.strategy)
        return simulate(plan, *others)

    for reader in ("cli.plan", "cli.placements", "placement.strategies.auto"):
        monkeypatch.setattr(f"natgrad.{reader}.simulate", counted)
    said = natgrad("plan", "--network", SHARED, "--ranks", "4", "--layout", "plain", "--short")
    assert said.code == 0
    assert not said.err
    shares = [f"Hybrid({share})" for share in ("1/4", "1/2", "1")]
    assert made == [*shares, "ReduceScatter()", "Local()"]


def test_local_gradients_take_reduce_scatter_apart(natgrad):
    said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--layout", "plain", "--short")
    table = rows(said.out, "Placements")
    assert list(table) == ["MemOpt()", "CommOpt()", "ReduceScatter()", "Local()"]


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", (2, 1)), ("float21", (8, 3))])
def test_intervals_and_dtypes_are_the_plan_s(natgrad, dtype, each):
    blocks, world = spread(kfac(network("mlp").without_weights()), 2, Layout.DDP)
    world = replace(world, update_every=1, refresh_every=2)
    world = replace(world, factor_bytes=each[0], factors_per_word=each[1])
    plan = CommOpt()(blocks, world)
    said = natgrad(
        *("plan", "--network", "mlp", "--ranks", "2", "--short", "--placement", "comm"),
        *("--update-every", "1", "--refresh-every", "2", "--wire-dtype", dtype),
    )
    sent = rows(said.out, "Placements")["CommOpt()"][4]
    assert sent == bytes_text(plan.average_sent())
    assert "updates every 1 and refreshes every 2 steps" in said.out


def test_an_average_step_sends_its_share_of_every_clock():
    blocks, world = spread(kfac(network(SHARED).without_weights()), 2, Layout.DDP)
    plan = MemOpt()(blocks, replace(world, update_every=5, refresh_every=20))
    expected = [
        sent.gradients
        + sent.agreement.apply
        + (sent.factors + sent.agreement.update) / 5
        + (sent.inverses + sent.agreement.refresh) / 20
        for sent in (plan.sent(0), plan.sent(1))
    ]
    assert plan.sent(0).agreement.apply > 0
    assert plan.average_sent() == pytest.approx(max(expected), rel=1e-12)


def test_the_inverse_is_the_plan_s(natgrad):
    blocks, world = spread(
        kfac(network("mlp").without_weights(), inverse=Cholesky()), 2, Layout.DDP
    )
    plan = CommOpt()(blocks, world)
    said = natgrad("plan", "--network", "mlp", "--ranks", "2", "--short", "--inverse", "cholesky")
    cells = rows(said.out, "Placements of mlp on 2 ranks, ddp, cholesky")["CommOpt()"]
    times = simulate(plan, Cluster())
    assert cells[2] == seconds_text(max(times.refresh))
    assert cells[5] == bytes_text(times.memory)


def test_one_rank(natgrad):
    said = natgrad("plan", "--network", SHARED, "--ranks", "1", "--short")
    (row,) = rows(said.out, "Placements of unit.cli.nets:Shared on 1 rank,").items()
    assert row[0] == "MemOpt() = CommOpt() = ReduceScatter() = Local()"
    assert row[1][-1] == "chosen, Auto"


class TestMemoryLimit:
    def test_auto_keeps_to_it(self, natgrad):
        """CommOpt is the cheapest of all on fast machines with slow links, and the largest."""
        command = ("plan", "--network", "resnet20", "--ranks", "4", "--short")
        slow = ("--cluster", "1e15,1e7,1e-6")
        free = rows(natgrad(*command, *slow).out, "Placements")
        assert free["CommOpt()"][-1] == "chosen, Auto"
        limited = rows(natgrad(*command, *slow, "--memory-limit", "16MiB").out, "Placements")
        assert limited["CommOpt()"][-1] == "above the limit"
        assert sum(cells[-1] == "chosen, Auto" for cells in limited.values()) == 1

    def test_nothing_fits(self, natgrad):
        said = natgrad("plan", "--network", "mlp", "--ranks", "2", "--memory-limit", "1MiB")
        assert said.code == 2
        assert said.err.startswith("natgrad: Auto may take 1.00 MiB per rank, but the least that")
        table = rows(said.out, "Placements")  # shows what would be possible
        assert {cells[-1] for cells in table.values()} == {"above the limit"}

    def test_a_placement_that_is_above_it(self, natgrad):
        command = ("plan", "--network", "mlp", "--ranks", "2", "--placement", "comm", "--short")
        said = natgrad(*command, "--memory-limit", "1MiB")
        assert said.code == 2
        blocks, world = spread(kfac(network("mlp").without_weights()), 2, Layout.DDP)
        most = CommOpt()(blocks, world).most_memory
        least = bytes_text(min(most, Hybrid(0.5)(blocks, world).most_memory))
        beginning = (
            f"natgrad: CommOpt() takes {bytes_text(most)} on a rank, {bytes_text(most - 2**20)} "
            "more than --memory-limit 1.00 MiB: raise it, or "
        )
        assert said.err.rstrip() == f"{beginning}use more ranks: the least is {least}."
        said = natgrad(*command, "--memory-limit", str(most - 1000))
        assert said.code == 2
        assert "or pass --placement auto: MemOpt() = ReduceScatter() takes " in said.err


class TestDrawing:
    def test_to_a_file(self, natgrad, tmp_path):
        pytest.importorskip("matplotlib")
        file = tmp_path / "plan.png"
        said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--short", "--draw", str(file))
        assert said.code == 0
        assert file.read_bytes().startswith(b"\x89PNG")
        assert f"The plan is drawn in {file}." in said.out

    @pytest.mark.parametrize("name", ["plan.nothing", "nowhere/plan.png"])
    def test_to_a_file_that_cannot_be(self, natgrad, tmp_path, name):
        pytest.importorskip("matplotlib")
        file = tmp_path / name
        said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--short", "--draw", str(file))
        assert said.code == 2
        assert said.err.startswith(f"natgrad: The plan cannot be drawn to --draw {file} (")
        assert said.err.rstrip().endswith(
            "): name a file that ends in .png, .pdf or .svg in a folder that exists."
        )

    def test_without_matplotlib(self, natgrad, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        file = str(tmp_path / "plan.png")
        said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--short", "--draw", file)
        assert said.code == 2
        assert said.err.rstrip() == (
            "natgrad: Plan.draw needs matplotlib, which is not installed: pip install "
            "'natgrad[report]', or print the plan as a table."
        )


def test_a_share_that_does_not_divide_the_ranks(natgrad):
    said = natgrad(
        *("plan", "--network", SHARED, "--ranks", "8", "--placement", "hybrid"),
        *("--fraction", "3/8"),
    )
    assert said.code == 2
    assert said.err.startswith("natgrad: Hybrid.fraction is 0.375, which lets 3 of 8 ranks")
    assert "Hybrid(1/4)" in said.out


def test_nothing_large_is_allocated(natgrad, monkeypatch):
    """Neither weights nor factors: every tensor that is made is on the meta device."""
    made = []
    real_empty = torch.empty

    def empty(*sizes, **options):
        tensor = real_empty(*sizes, **options)
        made.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    assert natgrad("plan", "--network", "resnet50", "--ranks", "8", "--short").code == 0
    assert len(made) > 50
    assert sum(t.numel() for t in made if not t.is_meta) < 1000


def test_no_cycles_are_searched_for_meanwhile(natgrad, monkeypatch):
    """Which took a fifth of the time of a large plan; afterwards, also after an error, they are."""
    searched = []

    def noted(*arguments):
        searched.append(gc.isenabled())
        return spread(*arguments)

    monkeypatch.setattr("natgrad.cli.plan.spread", noted)
    assert natgrad("plan", "--network", SHARED, "--ranks", "2", "--short").code == 0
    assert (searched, gc.isenabled()) == ([False], True)
    assert natgrad("plan", "--network", "none", "--ranks", "2").code == 2
    assert gc.isenabled()


def test_sizes_of_the_matrix_by_structure(natgrad):
    """AlexNet's, by hand from its shapes: full, layer by layer, and Kronecker."""
    said = natgrad("plan", "--network", "alexnet", "--sizes")
    assert said.code == 0
    shapes = [(1, 96, 3 * 121), (2, 128, 48 * 25), (1, 384, 256 * 9), (2, 192, 192 * 9)]
    shapes += [(2, 128, 192 * 9), (1, 4096, 9216), (1, 4096, 4096), (1, 1000, 4096)]
    counts = [groups * rows * (cols + 1) for groups, rows, cols in shapes]
    kronecker = sum(groups * (rows**2 + (cols + 1) ** 2) for groups, rows, cols in shapes)
    rows = {line[0]: line[1] for line in map(str.split, said.out.splitlines()) if len(line) > 1}
    assert rows["full"] == f"{60_965_224**2:,}"
    assert f" {sum(n * n for n in counts):,} " in said.out
    assert rows["Kronecker"] == f"{kronecker:,}"
