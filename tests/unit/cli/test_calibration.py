"""`natgrad plan --calibrate` writes a file that `--cluster` plans with."""

from dataclasses import replace

import pytest
import torch

import forked
from natgrad import KFAC, Auto, CommOpt
from natgrad.cli import calibration, options
from natgrad.cli.options import network
from natgrad.comm import Alone
from natgrad.lab.models.spreading import Layout, spread
from natgrad.placement import Flops, read_cluster, simulate, write_cluster
from natgrad.tables import bytes_text, seconds_text
from unit.cli import quick_calibration
from unit.cli.quick_calibration import QUICK
from unit.cli.test_plan import rows
from unit.lab.test_calibration import calibrated

SHARED = "unit.cli.nets:Shared"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little of it: what is measured is another test's business."""
    monkeypatch.setattr(calibration, "SETTINGS", QUICK)


def test_one_rank(natgrad, tmp_path):
    file = tmp_path / "cluster.json"
    said = natgrad("plan", "--calibrate", str(file))
    assert said.code == 0, said.err
    found = read_cluster(file)
    assert found.measured.ranks == 1
    assert found.measured.threads == torch.get_num_threads()
    table = rows(said.out, "Computations on 1 rank of")
    assert list(table) == ["2", "40"]
    assert table["40"][0] == seconds_text(found.cost.product.first[1])
    assert table["40"][2:] == [
        seconds_text(one.first[1]) for one in (found.cost.eigen, found.cost.cholesky)
    ]
    assert "One rank has no links to measure: they stay those of the default." in said.out
    assert f"What was measured is in {file}: plan with --cluster {file}." in said.out


def test_the_tables_of_several_ranks():
    found = calibrated(3)
    text = calibration.collectives_table(found).plain()
    assert "Collectives of 3 ranks" in text
    assert "latency 30.0 µs, 4.00 µs for each further message, 238 MiB/s; largest error 0%" in text
    one = found.collectives[0]
    line = next(line for line in text.splitlines() if line.split()[:1] == ["exchange"])
    assert bytes_text(one.nbytes) in line
    assert line.count(seconds_text(one.seconds)) == 2  # measured, and fitted
    assert "each further" not in calibration.collectives_table(calibrated(2)).plain()


def test_a_plan_with_what_was_measured(natgrad, tmp_path):
    file = tmp_path / "cluster.json"
    found = calibrated(4)
    write_cluster(found, file)
    said = natgrad(
        *("plan", "--network", SHARED, "--ranks", "4", "--short", "--placement", "comm"),
        *("--cluster", str(file)),
    )
    assert said.code == 0, said.err
    kfac = KFAC(network(SHARED).without_weights(), kl_clip=None)
    blocks, world = spread(kfac, 4, Layout.DDP)
    plan = CommOpt(cluster=found.cluster, cost=found.cost)(
        blocks, replace(world, update_every=10, refresh_every=100)
    )
    times = simulate(plan, found.cluster, found.cost)
    cells = rows(said.out, "Placements")["CommOpt()"]
    assert cells[1:4] == [seconds_text(max(t)) for t in (times.update, times.refresh, times.apply)]
    assert "chosen" in cells[-1]
    assert max(times.apply) > 10 * max(simulate(plan, found.cluster).apply)  # starts are in it
    assert ", computations as measured by size;" in said.out.replace("\n", " ")


def test_words(tmp_path):
    file = tmp_path / "cluster.json"
    found = calibrated(2)
    write_cluster(found, file)
    assert options.cluster(str(file)) == (found.cluster, found.cost)
    placed = options.placement("auto", None, None, found.cluster, found.cost)
    assert placed == Auto(cluster=found.cluster, cost=found.cost)
    assert options.placement("comm", None) == CommOpt(cost=Flops())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--calibrate", "nowhere/cluster.json"),
            "--calibrate is nowhere/cluster.json but there is no folder nowhere: make it, or name "
            "a file elsewhere.",
        ),
        (
            ("--calibrate", "cluster"),
            "--calibrate is cluster but must be a file for --cluster: give it a name that ends in "
            ".json.",
        ),
        (
            ("--network", SHARED, "--ranks", "2", "--cluster", "none.json"),
            "The cluster file none.json cannot be read (No such file or directory): name one that "
            "exists, or write it with natgrad plan --calibrate none.json.",
        ),
        (
            ("--ranks", "2"),
            "natgrad plan is given no --network but needs --network and --ranks to plan a run: "
            "pass both, or --calibrate FILE to measure this computer.",
        ),
        (
            ("--network", SHARED),
            "natgrad plan is given no --ranks but needs --network and --ranks to plan a run: "
            "pass both, or --calibrate FILE to measure this computer.",
        ),
    ],
)
def test_errors(natgrad, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    said = natgrad("plan", *arguments)
    assert (said.code, said.err) == (2, f"natgrad: {message}\n")


def test_ranks_that_were_not_started(natgrad, tmp_path, monkeypatch):
    comm = Alone()
    comm.size = 2
    monkeypatch.setattr(
        "natgrad.cli.calibration.joined", lambda: _Joined(comm, torch.device("cpu"))
    )
    said = natgrad("plan", "--calibrate", str(tmp_path / "cluster.json"), "--ranks", "4")
    assert (said.code, said.err) == (
        2,
        "natgrad: --ranks is 4 but 2 processes were started, which are measured as they are: "
        "leave it out.\n",
    )


class _Joined:
    def __init__(self, *what):
        self.what = what

    def __enter__(self):
        return self.what

    def __exit__(self, *error):
        return None


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_of_its_own(natgrad, tmp_path):
    file = tmp_path / "cluster.json"
    said = natgrad("plan", "--calibrate", str(file), "--ranks", "2")
    assert said.code == 0, said.err
    found = read_cluster(file)
    assert (found.measured.ranks, found.measured.threads) == (2, 1)
    assert {one.ranks for one in found.collectives} == {2}
    assert found.cost.eigen.sizes == QUICK.sizes
    table = rows(said.out, "Collectives of 2 ranks")
    assert list(table) == ["exchange", "total", "reduce_scatter", "all_gather"]
    said = natgrad("plan", "--network", "mlp", "--ranks", "2", "--short", "--cluster", str(file))
    assert said.code == 0, said.err


@pytest.mark.distributed
@pytest.mark.slow
def test_processes_of_torchrun(tmp_path, monkeypatch):
    file = tmp_path / "cluster.json"
    monkeypatch.setenv("COLUMNS", "200")
    said, other = forked.ranks(2, forked.script, quick_calibration.__file__, file)
    assert (said.code, other.code) == (0, 0), said.err
    assert read_cluster(file).measured.ranks == 2
    assert said.out.count("What was measured is in") == 1
    assert not other.out  # the first rank speaks
