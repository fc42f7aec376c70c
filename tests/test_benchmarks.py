"""The benchmarks measure what they say: sizes of networks, the average of a cycle, the yardstick.

The textbook K-FAC of `benchmarks/naive.py` is the yardstick of speed, so it must do the same
mathematics as the library: gradients are compared in float64.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    damping,
    distributed,
    networks,
    predicted,
    ranks,
    slow_links,
    squares,
    timing,
    wire_precision,
)
from benchmarks.naive import NaiveKFAC
from natgrad.kfac.clocks import Clock
from natgrad.lab.compare import ComparisonSetup, compare
from natgrad.lab.compare.results import Status
from natgrad.placement import (
    Agreement,
    Circumstances,
    Cluster,
    CommOpt,
    MeasuredCluster,
    MeasuredCost,
    MemOpt,
    Route,
    SecondsBySize,
    Sent,
    World,
    simulate,
)
from natgrad.tables import bytes_text
from unit.placement.networks import linear, mlp


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_networks_have_the_published_sizes():
    assert size(networks.resnet20()) == 269_722
    assert size(networks.resnet32()) == 464_154
    assert size(networks.resnet50()) == 25_557_032
    assert size(networks.mlp()) == 784 * 1024 + 2 * 1024 * 1024 + 10 * 1024 + 3 * 1024 + 10


@pytest.mark.parametrize(
    ("network", "shape", "outputs"),
    [
        (networks.resnet20, (3, 32, 32), 10),
        (networks.resnet50, (3, 64, 64), 1000),
        (networks.mlp, (784,), 10),
        (networks.encoder, (128, 256), 10),
        (networks.digits_autoencoder, (64,), 64),
        (networks.small_cnn, (1, 8, 8), 10),
    ],
)
def test_networks_run(network, shape, outputs):
    assert network()(torch.randn(2, *shape)).shape == (2, outputs)


def test_kinds_of_step_in_a_cycle():
    assert timing.kinds(1, 1) == {"both": 1}
    assert timing.kinds(1, 10) == {"both": 1, "update": 9}
    assert timing.kinds(10, 100) == {"both": 1, "update": 9, "stale": 90}
    assert timing.kinds(2, 3) == {"both": 1, "update": 2, "refresh": 1, "stale": 2}


def test_average_step_is_the_mean_over_a_cycle():
    seconds = {"stale": 1.0, "update": 3.0, "both": 10.0}
    assert timing.average_step(seconds, 1, 1) == 10.0
    assert timing.average_step(seconds, 1, 10) == pytest.approx((10 + 9 * 3) / 10)
    assert timing.average_step(seconds, 10, 100) == pytest.approx((10 + 9 * 3 + 90) / 100)
    # Every second step updates, every third refreshes; a refresh alone is 1 + (10 - 3) = 8.
    assert timing.average_step(seconds, 2, 3) == pytest.approx((10 + 2 * 3 + 8 + 2 * 1) / 6)


def test_interleave_calls_in_turn_and_times_only_after_the_warm_up():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    after = {"b": lambda: order.append("after")}
    times = timing.interleave(calls, 2, warmup=1, burst=1, after=after)
    assert order == ["a", "b", "after"] * 3
    assert [len(times[name].seconds) for name in "ab"] == [2, 2]


def test_verdicts_and_tables():
    rows = [
        timing.Row("ratio", 1.05, "x", 1.06),
        timing.Row("speed", 9.0, "x", 10.0, at_least=True),
        timing.Row("plain", 3.0, "ms"),
    ]
    assert [row.verdict for row in rows] == ["met", "MISSED", ""]
    lines = timing.Table("title", rows).render().splitlines()
    assert lines[0] == "title"
    assert lines[1].split() == ["what", "figure", "goal", "verdict"]
    assert lines[3].split() == ["ratio", "1.05x", "<=", "1.06", "met"]
    markdown = timing.Table("title", rows).render(markdown=True).splitlines()
    assert markdown[0] == "### title"
    assert all(line.startswith("|") and line.endswith("|") for line in markdown[2:])
    assert len({len(line) for line in markdown[2:]}) == 1


def tiny_conv_net() -> nn.Module:
    """Strides, padding, a 1x1 convolution, with and without bias, then two Linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, 5),
    ).double()


def gradients(model: nn.Module, preconditioner, batches: list[tuple[Tensor, Tensor]]):
    """Gradients after each step; the weights stay, so that errors do not grow."""
    steps = []
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        grads = [parameter.grad for parameter in model.parameters()]
        steps.append(torch.cat([grad.flatten() for grad in grads]).clone())
    return steps


@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
def test_the_textbook_and_the_library_agree(inverse, kl_clip):
    import natgrad

    torch.manual_seed(1)
    model = tiny_conv_net()
    twin = tiny_conv_net()
    twin.load_state_dict(model.state_dict())
    batches = [(torch.randn(7, 2, 6, 6).double(), torch.randint(5, (7,))) for _ in range(6)]
    options = {"damping": 1e-2, "kl_clip": kl_clip, "update_every": 2, "refresh_every": 4}
    naive = NaiveKFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.1), inverse=inverse, **options
    )
    library = natgrad.KFAC(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        inverse=natgrad.Eigen() if inverse == "eigen" else natgrad.Cholesky(),
        **options,
    )
    expected = gradients(model, naive, batches)
    for ours, theirs in zip(gradients(twin, library, batches), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


def test_the_textbook_solves_the_damped_kronecker_system():
    torch.manual_seed(2)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    naive = NaiveKFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.1, kl_clip=None)
    logits = model(x)
    F.cross_entropy(logits, y).backward()
    raw = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).clone()
    naive.step()
    new = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    a = torch.cat([x, x.new_ones(5, 1)], 1)
    g = logits.softmax(1).detach() - F.one_hot(y, 2)  # of single samples, not of the mean
    fisher = torch.kron(g.T @ g / 5, a.T @ a / 5)
    expected = torch.linalg.solve(fisher + 0.1 * torch.eye(8).double(), raw.flatten())
    torch.testing.assert_close(new.flatten(), expected, rtol=1e-10, atol=1e-12)


def test_kinds_of_steps_take_turns():
    update = Clock(ranks.Turns(("update", "both"), 10))
    refresh = Clock(ranks.Turns(("both",), 100))
    seen = []
    for step in range(9):
        due = []
        for name, clock in (("update", update), ("refresh", refresh)):
            if clock.due(step):
                clock.mark(step)
                due.append(name)
        seen.append(due)
    assert seen == [["update", "refresh"], [], ["update"]] * 3
    assert ranks.Turns(("both",), 100)(10**6) == 100  # what a planner asks for


def test_what_a_plan_predicts_for_a_kind_of_step():
    sent = Sent(100, 50, 7.0, Agreement(update=4.0, refresh=2.0, apply=1.0))
    assert ranks.by_kind(sent, "stale") == {"gradients": 7, "agreement": 1}
    assert ranks.by_kind(sent, "update") == {"gradients": 7, "factors": 100, "agreement": 5}
    assert ranks.by_kind(sent, "both") == {
        "gradients": 7,
        "factors": 100,
        "inverses": 50,
        "agreement": 7,
    }


def measured(seconds, sent, predicted, memory=8):
    names = ("DDP alone", "MemOpt()")
    times = dict(zip(names, seconds, strict=True))
    return ranks.Measured(
        {name: {kind: [times[name][kind], 99.0] for kind in ranks.KINDS} for name in names},
        {"MemOpt()": dict.fromkeys(ranks.KINDS, sent)},
        {"MemOpt()": predicted},
        {"MemOpt()": memory},
        {"MemOpt()": memory},
        {"MemOpt()": MemOpt()(mlp(2), World(2, route=Route.BALANCED))},
        parameters=1000,
    )


def test_a_line_is_of_the_slowest_rank_and_the_one_with_most():
    ddp, kfac = dict.fromkeys(ranks.KINDS, 1.0), {"stale": 1.0, "update": 2.0, "both": 11.0}
    slower = {kind: 2 * seconds for kind, seconds in kfac.items()}
    predicted = Sent(0, 0, 40.0, Agreement(0, 0, 0))
    results = [
        measured((ddp, kfac), {"gradients": 40.0}, predicted),
        measured((ddp, slower), {"gradients": 41.0}, predicted, memory=9),
    ]
    setting = ranks.Setting("mlp", 4, 2, ("MemOpt()",))
    alone, line = distributed.lines(setting, results)
    assert (alone.name, alone.milliseconds) == ("mlp, 2 ranks: DDP alone", 1000)
    assert alone.with_ddp == 4000  # 2 (W-1)/W of 1000 numbers
    assert (line.stale, line.update, line.both) == (2, 4, 22)
    assert line.figure == pytest.approx((22 + 9 * 4 + 90 * 2) / 100)
    assert (line.sent, line.predicted, line.with_ddp) == (41, 40, 4041)
    assert (line.memory, line.exact) == (9, False)
    assert distributed.lines(setting, results[:1])[1].exact


def test_all_ratios_are_to_one_step_of_ddp():
    """Which does the same whatever K-FAC does in its turn: the least of all of them."""
    ddp, kfac = {"stale": 1.5, "update": 1.0, "both": 2.0}, dict.fromkeys(ranks.KINDS, 6.0)
    results = [measured((ddp, kfac), {}, Sent(0, 0, 0.0, Agreement(0, 0, 0)))]
    alone, line = distributed.lines(ranks.Setting("mlp", 4, 2, ("MemOpt()",)), results)
    assert alone.milliseconds == pytest.approx(1000)
    assert (line.figure, line.stale, line.update, line.both) == pytest.approx((6, 6, 6, 6))


@pytest.mark.distributed
def test_placements_beside_ddp_send_what_was_predicted(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    options = ["--models", "small_cnn", "--ranks", "2", "--batch", "4", "--repeats", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["distributed.py", *options, str(file)])
    distributed.main()
    rows = json.loads(file.read_text())["tables"][0]["rows"]
    names = [row["name"].removeprefix("small_cnn, 2 ranks: ") for row in rows]
    assert names[:-1] == ["DDP alone", *list(ranks.PLACEMENTS)[:-1]]
    assert names[-1].startswith("Auto: ")
    by_name = dict(zip(names, rows, strict=True))
    for name, row in by_name.items():
        assert row["exact"], name
        assert row["sent"] == row["predicted"]
        assert row["memory"] == row["planned"]
        if name != "DDP alone":
            assert min(row["figure"], row["stale"], row["update"], row["both"]) > 0
            assert row["sent"] > 0
            assert row["memory"] > 0
    ring = by_name["DDP alone"]["with_ddp"]
    assert ring == 4 * size(networks.small_cnn())  # 2 (W-1)/W = 1
    assert by_name["CommOpt()"]["sent"] < by_name["MemOpt()"]["sent"]
    assert by_name["Local()"]["sent"] < by_name["MemOpt()"]["sent"]
    assert by_name["CommOpt()"]["memory"] > by_name["MemOpt()"]["memory"]
    # It adds up the gradients instead of DDP, and sends less than both together.
    assert by_name["ReduceScatter()"]["sent"] > by_name["MemOpt()"]["sent"]
    assert by_name["ReduceScatter()"]["with_ddp"] < by_name["MemOpt()"]["with_ddp"]
    text = capsys.readouterr().out
    assert "torch.set_num_threads(1)" in text
    (line,) = [line for line in text.splitlines() if "2 ranks: MemOpt()" in line]
    assert line.count(bytes_text(by_name["MemOpt()"]["sent"])) == 2  # counted and predicted


def test_squares_with_and_without(monkeypatch):
    monkeypatch.setattr(squares, "STEPS", 4)
    runs = {
        name: squares.train(squares.FITS["zeros"], 0.01, settings, 0)
        for name, settings in squares.SETTINGS.items()
    }
    first = {losses[0] for losses in runs.values()}
    assert len(first) == 1  # the same weights and batches
    assert runs["K-FAC"][-1] < first.pop()
    assert squares.cell([[1.0] * 30, [3.0] * 30, [2.0, 9.0] + [2.0] * 30]) == "2 (9)"
    text = squares.table(["zeros"], [0.1], 1).splitlines()
    assert [line.count("|") for line in text] == [7, 7, 7]


def test_more_ranks_than_cores_are_said_to_be(monkeypatch):
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert "oversubscribed" not in distributed.note([1, 2], 32)
    assert "More than 2 ranks are oversubscribed" in distributed.note([1, 2, 4], 32)


def test_slow_links_are_predicted_from_fast_ones():
    """What the simulator says of the link is added to a step on fast ones, and to DDP's."""
    ddp, kfac = dict.fromkeys(ranks.KINDS, 1.0), {"stale": 1.0, "update": 2.0, "both": 11.0}
    slow = {kind: 3 * seconds for kind, seconds in kfac.items()}
    predicted = Sent(0, 0, 0.0, Agreement(0, 0, 0))
    fast = [measured((ddp, kfac), {}, predicted)] * 2
    found = [measured((dict.fromkeys(ranks.KINDS, 1.5), slow), {}, predicted)] * 2
    setting = ranks.Setting("even", 32, 1, ("MemOpt()",))
    rate = 1e4
    links = Cluster(1e9, rate, 1e-4, duplex=0.0, exchanged_sums=True)
    lines = {one.kind: one for one in slow_links.lines(setting, fast, found, links)}
    plan = found[0].plan["MemOpt()"]
    times = simulate(plan, replace(links, flops=slow_links.ANY))
    added = {"stale": max(times.apply)}
    added["update"] = added["stale"] + max(times.update)
    added["both"] = added["update"] + max(times.refresh)
    for kind, line in lines.items():
        assert (line.fast, line.slow) == (kfac[kind], slow[kind])
        assert line.predicted == pytest.approx(kfac[kind] + 0.5 + added[kind])
        assert line.ratio == pytest.approx(line.predicted / slow[kind])
    assert lines["update"].predicted > plan.flows(plan.update).busiest / rate


@pytest.mark.distributed
def test_short_numbers_on_the_wire(monkeypatch, capsys):
    """All settings see the same batches from the same weights, so float32 has no error, and each
    other one some."""
    argv = ["wire_precision.py", "--ranks", "4", "--batch", "4", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    wire_precision.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("4 ranks")]
    cells = [line.removeprefix("4 ranks, ").rsplit(maxsplit=3) for line in lines]
    found = {name.rsplit(maxsplit=2)[0]: numbers for name, *numbers in cells}
    assert found.keys() == wire_precision.SETTINGS.keys()
    assert found.pop("float32") == ["1.00", "0.000%", "0.000%"]
    errors = {}
    for name, (share, first, mean) in found.items():
        short = name.startswith(("factors", "inverses", "gradients", "all"))
        assert 0 < float(share) < 1 if short else share == "1.00"
        assert 0 < float(first.rstrip("%")) < 20
        errors[name] = float(mean.rstrip("%"))
        assert 0 < errors[name] < 20
    for what in ("factors", "inverses", "gradients", "all"):
        one, other = f"{what} in float21", f"{what} in bfloat16"
        assert float(found[other][0]) < float(found[one][0])
        assert errors[one] < errors[other] / 5
    assert errors["16-bit products"] < errors["autocast"]


def test_where_links_cannot_be_slow(monkeypatch, capsys):
    monkeypatch.setattr(slow_links.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["slow_links.py"])
    slow_links.main()
    says = "No slow links here: slow links need Linux with ip and tc."
    assert capsys.readouterr().out.strip() == says


@pytest.mark.slow
@pytest.mark.distributed
def test_slow_links_are_really_slow():
    """A step that updates takes no less than its bytes take on the link."""
    rate = 2e6
    setting = ranks.Setting("wide", 4, 1, ("MemOpt()",))
    try:
        with slow_links.switched(2) as names:
            slow_links.slow_down(names, rate, 0.0)
            found, links = slow_links.train(names, setting)
    except slow_links.NoSlowLinksError as reason:
        pytest.skip(str(reason))
    plan = found[0].plan["MemOpt()"]
    least = (plan.flows(plan.update).busiest - 2**17) / rate  # but for what a burst lets through
    assert min(distributed.slowest(found, "MemOpt()", "update")) > least > 0.3
    assert links is None  # nobody has asked for them
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "natgrad" not in left.stdout


@pytest.mark.slow
def test_dampings_are_tried_on_the_same_task(tmp_path):
    asked = ComparisonSetup(
        replace(damping.settings("digits-cnn"), epochs=0.0, steps=3, width=4),
        damping.contenders(),
        trials=1,
        seeds=1,
    )
    found = compare(asked, tmp_path)
    rows = damping.rows("digits-cnn", found)
    assert [row.name for row in rows] == [f"digits-cnn, damping {d:g}" for d in damping.DAMPINGS]
    assert [row.figure for row in rows] == [entry.runs[0].final for entry in found.entries]
    assert len({row.figure for row in rows}) == 3
    first = found.entries[0]
    lost = replace(first.runs[0], status=Status.DIVERGED, final=None)
    other = replace(found, entries=(replace(first, runs=(lost,)),))
    (row,) = damping.rows("digits-cnn", other)
    assert math.isnan(row.figure)
    assert row.note == f"{lost.lr:g}, diverged"


def test_tasks_of_the_damping_are_known():
    for task, own in damping.TASKS.items():
        made = damping.settings(task)
        assert made.steps == own.get("steps", made.steps)


# Predicted and measured.


def test_predictions_are_of_the_slowest_rank_and_the_fastest_step():
    blocks = [linear("a", 64, 64, 1, bias=False)]
    plan = CommOpt()(blocks, World(1))
    flops = 1e9
    cost = MeasuredCost(flops, *(SecondsBySize((64,), (t,), (t,)) for t in (1e-3, 1e-2, 5e-3)))
    about = Circumstances("2030-01-02", "cpu", 1, 1, "2.0")
    machine = MeasuredCluster(Cluster(flops), cost, (), about)

    def rank(*steps):
        seconds = dict.fromkeys(ranks.KINDS, 1.0)
        made = measured((seconds, seconds), {}, Sent(0, 0, 0, Agreement(0, 0, 0)), memory=3)
        stages = [{"apply": apply, "fold": fold, "A": 7.0, "G": 1.0} for apply, fold in steps]
        made.stages = {"MemOpt()": dict.fromkeys(ranks.KINDS, stages)}
        made.plan = {"MemOpt()": plan}
        return made

    results = [rank((1.0, 0.5), (0.25, 0.25)), rank((0.5, 0.25), (0.5, 0.125))]
    setting = ranks.Setting("mlp", 4, 2, ("MemOpt()",))
    rows = predicted.predictions(setting, results, machine)
    assert [row.kind for row in rows] == ["stale", "update", "both"]
    assert [row.kfac for row in rows] == pytest.approx([4.0, 4.0, 24.0])  # 4 products, 2 eigh
    assert {row.own for row in rows} == {625.0}  # of the second step, where rank 1 is slower
    assert {row.statistics for row in rows} == {8000.0}
    # A step of DDP alone, statistics and K-FAC.
    assert [row.predicted for row in rows] == pytest.approx([9004.0, 9004.0, 9024.0])
    assert {row.measured for row in rows} == {1000.0}
    assert rows[2].figure == pytest.approx(9.024)
    assert {(row.planned, row.memory) for row in rows} == {(ranks.kept(plan, 0), 3)}


@pytest.mark.distributed
def test_every_placement_is_predicted_beside_what_was_measured(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    options = ["--models", "small_cnn", "--ranks", "2", "--batch", "4", "--repeats", "1", "--quick"]
    monkeypatch.setattr(sys, "argv", ["predicted.py", *options, "--json", str(file)])
    predicted.main()
    rows = json.loads(file.read_text())["tables"][0]["rows"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    assert names == [f"small_cnn, 2 ranks: {name}" for name in ranks.PLACEMENTS]
    for row in rows:
        assert row["planned"] == row["memory"] > 0
        assert row["figure"] == pytest.approx(row["predicted"] / row["measured"])
        assert (row["statistics"] > 0) == (row["kind"] != "stale")
    for stale, update, both in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        # Where no factor is sent, an update costs what folding was measured to: perhaps nothing.
        assert 0 < stale["kfac"] <= update["kfac"] < both["kfac"]
    by_name = dict(zip(names, zip(rows[::3], rows[1::3], strict=True), strict=True))
    stale, update = by_name["small_cnn, 2 ranks: MemOpt()"]
    assert stale["kfac"] < update["kfac"]
    assert "largest error of the fitted links" in capsys.readouterr().out
