"""Checkpoints that all ranks write and read together, each its own share."""

import json
import os
import pickle
import signal
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import natgrad
from distributed.resuming import Training, held, run
from distributed.test_checkpoints import END, undisturbed
from distributed.test_parity import PLACEMENTS, assert_same
from distributed.training import METHODS
from kfac_keywords import grouped
from natgrad.comm import CommunicationError, checkpoints
from natgrad.comm.base import Communicator
from natgrad.errors import CheckpointError
from training_loops import assert_equal

WAYS = ["kfac", "dcp"]
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]  # of two ranks


def save(run, folder, way="kfac", end=4, last=END):
    """By `KFAC.save`, or by the user's own call of torch, before a step that updates."""
    training = Training.here(run).steps(0, end)
    beside = {"state": Others(training), "step": end}
    if way == "kfac":
        training.kfac.save(folder, beside)
    else:
        dcp.save({**beside, "kfac": training.kfac.shards()}, checkpoint_id=folder)
    state, plan = training.kfac.state_dict(), training.kfac.plan
    owners = {
        kind: {f"{name}:{block}": ranks for (block, name), ranks in of.items()}
        for kind, of in (("factors", plan.keepers), ("parts", plan.holders))
    }
    weights = training.steps(end, last).weights()
    return {"weights": weights, "state": state, "owners": owners}


def load(run, folder, way="kfac"):
    training = Training.here(run).steps(50, 51)
    beside = {"state": Others(training), "step": 0}
    with Reads() as reads:
        if way == "kfac":
            training.kfac.load(folder, beside)
        else:
            beside["kfac"] = training.kfac.shards()
            dcp.load(beside, checkpoint_id=folder)
    there, state = held(training.kfac), training.kfac.state_dict()
    assert training.kfac.steps == beside["step"]
    weights = training.steps(beside["step"], END).weights()
    return {"weights": weights, "state": state, "held": there, "reads": sorted(set(reads.names))}


class Others:
    """Model and optimizer, as something with a state of its own."""

    def __init__(self, training):
        self.training = training

    def state_dict(self):
        optimizer = self.training.optimizer
        for p in self.training.model.parameters():
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        momenta = {n: optimizer.state[p]["momentum_buffer"] for n, p in self.training.parameters()}
        model = {n: p.detach() for n, p in self.training.parameters()}
        return {"model": model, "momenta": momenta}

    def load_state_dict(self, state):
        pass  # read into the tensors themselves


class Reads:
    """The names of what this rank reads."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        self.original = FileSystemReader.read_data

        def read_data(reader, plan, planner):
            self.names += [item.storage_index.fqn for item in plan.items]
            return self.original(reader, plan, planner)

        FileSystemReader.read_data = read_data
        return self

    def __exit__(self, *_):
        FileSystemReader.read_data = self.original


def files(folder):
    """The rank that wrote each tensor of K-FAC, by ``kind``, ``factor:block`` and the rest."""
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    found = {}
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("kfac.") and index.fqn != "kfac.header":
            kind, factor, part, block = index.fqn.removeprefix("kfac.").split(":", 3)
            key = (kind, f"{factor}:{block}", part)
            assert key not in found
            found[key] = int(info.relative_path.split("_")[2])
    return found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


BIT_BY_BIT = ["plain", "ddp", "fsdp"]
PLACED = ["mem", "half", "comm", "scatter"]


def in_turn(methods, turn):
    """Each method with one of the ways, and in the next turn with the next."""
    return [(method, list(WAYS)[(i + turn) % len(WAYS)]) for i, method in enumerate(methods)]


def of_way(way):
    """Placements and methods: of all pairs one in two, and the others in another way."""
    turn = list(WAYS).index(way)
    pairs = product(enumerate(PLACED), enumerate(METHODS))
    return [(p, m) for (i, p), (j, m) in pairs if (i + j + turn) % len(WAYS) == 0]


class TestFolder:
    def test_every_method_meets_every_way(self):
        """In one of the layouts; there every way is taken, and of one file every pair."""
        met = [in_turn(METHODS, turn) for turn in range(len(BIT_BY_BIT))]
        assert {pair for pairs in met for pair in pairs} == set(product(METHODS, WAYS))
        assert all({way for _, way in pairs} == set(WAYS) for pairs in met)
        for way in WAYS:
            found = {(placement, method) for placement, method in of_way(way)}
            assert {method for _, method in found} == set(METHODS)
            assert {placement for placement, _ in found} == set(PLACED)
        assert {pair for way in WAYS for pair in of_way(way)} == set(product(PLACED, METHODS))

    @pytest.mark.parametrize("layout", BIT_BY_BIT)
    def test_goes_on_bit_by_bit(self, world, tmp_path, layout):
        """Each method in one way, and in the next layout in the other."""
        calls, turn = {}, BIT_BY_BIT.index(layout)
        for method, way in in_turn(METHODS, turn):
            this = run(layout, **METHODS[method], placement=natgrad.Hybrid(0.5))
            calls[method, way] = (this, tmp_path / f"{method}, {way}", way)
        whole = world.each(save, calls, ranks=2)
        again = world.each(load, calls, ranks=2)
        for key in calls:
            for one, other in zip(whole[key], again[key], strict=True):
                assert_equal(other["state"], one["state"], str(key))
                assert_equal(other["weights"], one["weights"], str(key))

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ((1, "plain", "auto"), (3, "ddp", "mem")),
            ((4, "ddp", "half"), (1, "plain", "auto")),
            ((2, "plain", "comm"), (4, "ddp", "mem")),
            ((4, "plain", "scatter"), (2, "ddp", "comm")),
            ((3, "fsdp", "mem"), (3, "fsdp", "comm")),
            ((2, "fsdp", "mem"), (4, "fsdp", "half")),
        ],
        ids=lambda part: "-".join(map(str, part)),
    )
    def test_goes_on_with_other_ranks(self, world, tmp_path, before, after):
        results = {}
        for call, (ranks, layout, placement) in ((save, before), (load, after)):
            kfac = {"placement": PLACEMENTS[placement]}
            calls = {m: (run(layout, **METHODS[m], **kfac), tmp_path / m) for m in METHODS}
            results = world.each(call, calls, ranks=ranks)
        for method, each in results.items():
            for result in each:
                assert_same(result["weights"], undisturbed("mlp", method).weights(), method)

    @pytest.mark.parametrize("way", WAYS)
    def test_has_everything_once_from_a_rank_that_keeps_it(self, world, tmp_path, way):
        calls = {}
        for placement, method in of_way(way):
            this = run("ddp", **METHODS[method], placement=PLACEMENTS[placement])
            calls[placement, method] = (this, tmp_path / f"{placement}, {method}", way, 4, 4)
        for key, (first, *_) in world.each(save, calls, ranks=4).items():
            found = files(calls[key][1])
            for (kind, factor, _), rank in found.items():
                assert rank in first["owners"][kind][factor], key
            for kind, of in first["owners"].items():
                assert {factor for k, factor, _ in found if k == kind} == set(of), key

    @pytest.mark.parametrize("method", METHODS)
    def test_is_read_as_far_as_it_is_needed(self, world, tmp_path, method):
        before = run("ddp", **METHODS[method], placement=natgrad.CommOpt())
        world.run(save, before, tmp_path / "last", "kfac", 4, 4, ranks=3)
        calls = {}
        for placement in ("mem", "half", "comm"):
            after = run("ddp", **METHODS[method], placement=PLACEMENTS[placement])
            calls[placement] = (after, tmp_path / "last")
        for placement, results in world.each(load, calls, ranks=4).items():
            for result in results:
                there = result["held"]
                assert there["running"] == there["kept"], placement
                assert there["parts"] == there["held"], placement
                mine = {("factors", *f) for f in there["kept"]}
                mine |= {("parts", *f) for f in there["held"]}
                keys = [n.removeprefix("kfac.") for n in result["reads"] if n.startswith("kfac.")]
                read = {
                    (kind, block, factor)
                    for kind, factor, _, block in (n.split(":", 3) for n in keys if n != "header")
                }
                assert read == mine, placement

    def test_before_the_first_step(self, world, tmp_path):
        this = run("ddp")
        whole = world.run(save, this, tmp_path / "last", "kfac", 0, ranks=2)
        for result in world.run(load, this, tmp_path / "last", ranks=2):
            assert_equal(result["weights"], whole[0]["weights"])
            assert_equal(result["state"], whole[0]["state"])

    def test_of_one_process_without_torch_distributed(self, tmp_path):
        first = Training(run()).steps(0, 3)
        first.kfac.save(tmp_path / "new" / "last")
        again = Training(run())
        again.kfac.load(str(tmp_path / "new" / "last"))
        assert_equal(again.kfac.state_dict(), first.kfac.state_dict())
        assert names(tmp_path / "new") == ["last"]

    def test_draws_go_on(self, world, tmp_path):
        this = run("ddp", curvature=natgrad.MonteCarloFisher(samples=2))
        whole = world.run(save, this, tmp_path / "last", ranks=2)
        for result in world.run(load, this, tmp_path / "last", ranks=2):
            assert_equal(result["weights"], whole[0]["weights"])

    def test_is_replaced_by_the_next_one(self, world, tmp_path):
        """Also by one of fewer ranks, of which nothing may stay."""
        world.run(save, run(), tmp_path / "last", "kfac", 3, ranks=3)
        (first, *_) = world.run(save, run(), tmp_path / "last", "kfac", 4, ranks=2)
        assert names(tmp_path / "last") == FILES
        assert names(tmp_path) == ["last"]
        (again, *_) = world.run(load, run(), tmp_path / "last", ranks=2)
        assert_equal(again["state"], first["state"])


def interrupted(run, folder, where, victim):
    """Save once, then again with one rank that dies; says what the others raise."""
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=5))
    training = Training.here(run)
    training.kfac, training.optimizer = _connected(training, group)
    training.steps(0, 3)
    training.kfac.save(folder, {"step": 3})
    training.steps(3, 5)
    if dist.get_rank() == victim:
        owner, name = WHERE[where]
        original = getattr(owner, name)

        def die(*args, **kwargs):
            if where == "after writing":
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)
    with pytest.raises(CommunicationError) as error:
        training.kfac.save(folder, {"step": 5})
    return str(error.value)


def _connected(training, group):
    training.kfac.detach()
    settings = {**training.run.kfac, "group": group}
    optimizer = training.optimizer
    return natgrad.KFAC(training.model, optimizer, **grouped(**settings)), optimizer


WHERE = {
    "before writing": (FileSystemWriter, "prepare_local_plan"),
    "while writing": (FileSystemWriter, "write_data"),
    "after writing": (FileSystemWriter, "write_data"),
    "before the metadata": (FileSystemWriter, "finish"),
    "before replacing": (checkpoints.CheckpointFolder, "replace"),
}


class TestInterrupted:
    @pytest.mark.parametrize(
        ("where", "victim"),
        [
            *((where, victim) for where in list(WHERE)[:3] for victim in (0, 2)),
            ("before the metadata", 0),
            ("before replacing", 0),
        ],
    )
    def test_the_last_good_one_stays(self, world, tmp_path, where, victim):
        folder = tmp_path / "last"
        this = run("ddp", placement=natgrad.MemOpt())
        texts = world.run(interrupted, this, folder, where, victim, ranks=3, lost=[victim])
        for text in (text for rank, text in enumerate(texts) if rank != victim):
            assert "Another rank has ended, hangs or took another way" in text
        assert {result["step"] for result in world.run(step_of, folder, ranks=2)} == {3}
        # The next save clears away what is left of this one.
        world.run(save, this, folder, "kfac", 4, ranks=2)
        assert names(folder) == FILES
        assert {result["step"] for result in world.run(step_of, folder, ranks=2)} == {4}
        assert names(tmp_path) == ["last"]

    def test_between_the_two_renames(self, tmp_path, monkeypatch):
        """The folder is away, and found again by whatever comes next."""
        kfac = Training(run()).steps(0, 3).kfac
        expected = kfac.state_dict()
        for call in (kfac.load, kfac.save):
            kfac.save(tmp_path / "last")
            original = Path.rename

            def rename(path, target, original=original):
                if path.name == ".last.unfinished":
                    raise KeyboardInterrupt
                return original(path, target)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", rename)
                with pytest.raises(KeyboardInterrupt):
                    kfac.save(tmp_path / "last")
            assert not (tmp_path / "last").exists()
            call(tmp_path / "last")
            assert_equal(kfac.state_dict(), expected)
            kfac.load(tmp_path / "last")
            assert_equal(kfac.state_dict(), expected)

    def test_a_full_disk_is_said_on_all_ranks(self, world, tmp_path):
        texts = world.run(disk_full, tmp_path / "last", ranks=3)
        assert len(set(texts)) == 1
        assert texts[0] == (
            f"Rank 1 could not save to '{tmp_path / 'last'}' (OSError: [Errno 28] No space left on "
            "device). What was there before still is: see that all ranks reach the folder, and "
            "that the model is the same."
        )
        assert {result["step"] for result in world.run(step_of, tmp_path / "last", ranks=2)} == {3}


def step_of(folder):
    """As a new training finds it."""
    found = {"step": 0}
    training = Training.here(run("ddp"))
    training.kfac.load(folder, found)
    assert training.kfac.steps == found["step"]
    return found


def disk_full(folder):
    training = Training.here(run("ddp")).steps(0, 3)
    training.kfac.save(folder, {"step": 3})

    def write_data(*_):
        raise OSError(28, "No space left on device")

    if training.rank == 1:
        FileSystemWriter.write_data = write_data
    with pytest.raises(CheckpointError) as error:
        training.kfac.save(folder, {"step": 4})
    return str(error.value)


def refusal(run, folder, change=None):
    """Why a folder is not loaded, on each rank; nothing may change."""
    training = Training.here(run).steps(0, 2)
    before, weights = training.kfac.state_dict(), training.weights()
    if change is not None and training.rank == 1:
        change(training)
    with pytest.raises((CheckpointError, natgrad.errors.SettingError)) as error:
        training.kfac.load(folder, {"state": Others(training)})
    assert_equal(training.kfac.state_dict(), before)
    assert_equal(training.weights(), weights)
    return str(error.value)


def folder_of_its_own(training):
    original = training.kfac.load
    training.kfac.load = lambda folder, beside: original(f"{folder}-1", beside)


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"name": "cnn"}, "The state is of another model: the model has no '0', '2', '4'"),
            ({"inverse": natgrad.Cholesky()}, "The state of block '0' has inverse 'Eigen()', but"),
            ({"structure": natgrad.EKFAC()}, "The state of block '0' has structure \"Kronecker(s"),
        ],
        ids=["model", "inverse", "structure"],
    )
    def test_of_something_else(self, world, tmp_path, settings, sentence):
        world.run(save, run("ddp"), tmp_path / "last", ranks=2)
        for text in world.run(refusal, run("ddp", **settings), tmp_path / "last", ranks=3):
            assert text.startswith(sentence)

    def test_nothing_there(self, world, tmp_path):
        for text in world.run(refusal, run("ddp"), tmp_path / "last", ranks=2):
            assert text == (
                f"There is no complete checkpoint in '{tmp_path / 'last'}': pass a folder that "
                "KFAC.save() or torch.distributed.checkpoint has written."
            )

    def test_without_kfac(self, world, tmp_path):
        world.run(save_something, tmp_path / "last", ranks=2)
        for text in world.run(refusal, run("ddp"), tmp_path / "last", ranks=2):
            assert text.startswith(f"Rank 0 could not load from '{tmp_path / 'last'}' (RuntimeErr")
            assert "Missing key in checkpoint state_dict: kfac.header" in text

    def test_another_folder_on_one_rank(self, world, tmp_path):
        world.run(save, run("ddp"), tmp_path / "last", ranks=2)
        for text in world.run(refusal, run("ddp"), tmp_path / "last", folder_of_its_own, ranks=2):
            assert text == (
                f"Rank 1 was given the folder '{tmp_path / 'last'}-1' and rank 0 "
                f"'{tmp_path / 'last'}': pass the same one, which all ranks can reach."
            )

    def test_files_that_are_not_ours(self, tmp_path):
        kfac = Training(run()).steps(0, 1).kfac
        (tmp_path / "log.txt").write_text("important")
        with pytest.raises(CheckpointError) as error:
            kfac.save(tmp_path)
        assert str(error.value) == (
            f"'{tmp_path}' has other files than those of a checkpoint ('log.txt'), which replacing "
            "it would delete: pass a folder of its own."
        )
        with pytest.raises(CheckpointError, match="has other files than those of a checkpoint"):
            kfac.save(tmp_path / "log.txt")
        assert (tmp_path / "log.txt").read_text() == "important"

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        kfac = Training(run()).steps(0, 1).kfac
        with pytest.raises(CheckpointError, match=r"cannot be used \(.*\): pass another folder"):
            kfac.save(tmp_path / "file" / "last")

    def test_the_name_of_kfac(self, tmp_path):
        kfac = Training(run()).kfac
        for call in (kfac.save, kfac.load):
            with pytest.raises(
                natgrad.errors.SettingError, match="beside has a 'kfac', which is what"
            ):
                call(tmp_path / "last", {"kfac": 1})

    def test_other_ways_to_reach_ranks(self, tmp_path):
        class Wire(Communicator):
            _exchange = _total = _gather = _all_gather = _split = None

        with pytest.raises(natgrad.errors.SettingError) as error:
            checkpoints.write(Wire(0, 2), tmp_path / "last", {})
        assert str(error.value) == (
            "save() and load() need torch.distributed to reach the other ranks, which here are "
            "connected by Wire: save what state_dict() returns, on rank 0."
        )

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_kfac_itself_in_place_of_its_shards(self, tmp_path):
        dcp.save({"kfac": Training(run()).steps(0, 3).kfac}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointError) as error:
            dcp.load({"kfac": Training(run()).kfac}, checkpoint_id=tmp_path)
        assert str(error.value) == (
            "The state of block '0' has none of its factors, as when torch.distributed.checkpoint "
            "reads into a new KFAC, which does not have them yet. Give it kfac.shards() instead of "
            "kfac."
        )

    def test_a_damaged_header(self):
        kfac = Training(run()).steps(0, 3).kfac
        state = kfac.shards().state_dict()
        for header in (None, "{", "[]", json.dumps({"steps": 3})):
            with pytest.raises(CheckpointError, match="The header of the state cannot be read: it"):
                kfac.shards().load_state_dict({**state, "header": header})

    def test_a_missing_tensor(self):
        kfac = Training(run()).steps(0, 3).kfac
        state = kfac.shards().state_dict()
        del state["factors:A:mean:2"]
        with pytest.raises(CheckpointError, match="block '2', factors A, is None and no tensor of"):
            kfac.shards().load_state_dict(state)


def save_something(folder):
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
