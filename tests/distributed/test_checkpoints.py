"""A run saved on some ranks goes on, on as many or others, as if nothing had happened."""

import copy
from functools import lru_cache

import pytest
import torch

import natgrad
from distributed.resuming import Training, held, run
from distributed.test_parity import PLACEMENTS, assert_same
from distributed.training import METHODS
from natgrad.errors import CheckpointError
from training_loops import assert_equal

END = 8


@lru_cache(maxsize=64)
def undisturbed(name, method, end=END):
    """One process that saw the batches of all ranks as one."""
    return Training(run(name=name, **METHODS[method])).steps(0, end)


def save(run, end=5):
    training = Training.here(run).steps(0, end)
    saved = training.saved()
    return {"saved": saved, "weights": training.steps(end, END).weights()}


def resume(run, saved):
    training = Training.here(run).steps(50, 51)  # of another past
    training.resume(saved)
    there = held(training.kfac)
    memory = training.kfac.memory().total
    again = training.kfac.state_dict()
    weights = training.steps(saved["kfac"]["steps"], END).weights()
    planned = training.kfac.plan.memory(training.rank)
    return {
        "weights": weights,
        "held": there,
        "again": again,
        "memory": memory,
        "planned": planned,
    }


def same_curvature(found, expected):
    """The matrices that decompositions are of, as their vectors are not unique."""
    assert found.keys() == expected.keys()
    for name in found:
        if len(found[name]) == 2 and found[name][0].numel():
            dense = [q.mT @ (v.unsqueeze(-1) * q) for q, v in (found[name], expected[name])]
            torch.testing.assert_close(*dense, rtol=1e-9, atol=1e-9)
        else:
            assert_close(found[name], expected[name])


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def shapes(state):
    """Keys, numbers and strings, with the shapes and dtypes of tensors."""
    if isinstance(state, dict):
        return {key: shapes(value) for key, value in state.items()}
    if isinstance(state, list):
        return [shapes(value) for value in state]
    return (state.shape, state.dtype) if isinstance(state, torch.Tensor) else state


class TestState:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        ("ranks", "layout", "placement", "name"),
        [
            (2, "ddp", "mem", "lm"),
            (3, "plain", "scatter", "mlp"),
            (4, "fsdp", "half", "cnn"),
            (3, "ddp", "comm", "cnn"),
            (4, "plain", "mem", "mlp"),
        ],
    )
    def test_is_that_of_one_process(self, world, ranks, layout, placement, name, method):
        kfac = {**METHODS[method], "placement": PLACEMENTS[placement]}
        results = world.run(save, run(layout, name, **kfac), ranks=ranks)
        expected = Training(run(name=name, **METHODS[method])).steps(0, 5).kfac.state_dict()
        first = results[0]["saved"]["kfac"]
        assert shapes(first) == shapes(expected)
        for result in results[1:]:
            assert_equal(result["saved"]["kfac"], first)
        for name, block in expected["blocks"].items():
            found = first["blocks"][name]
            for factor, running in block["factors"].items():
                assert_close(found["factors"][factor].values(), running.values())
            if method == "ekfac":
                continue  # S is in a basis whose vectors have no sign
            same_curvature(found["parts"], block["parts"])

    @pytest.mark.parametrize("bucket", [1, 64, 1000])
    def test_travels_in_small_pieces(self, world, bucket):
        settings = {"placement": natgrad.MemOpt()}
        (whole, *_) = world.run(save, run(**settings), ranks=3)
        for result in world.run(save, run(**settings, bucket_bytes=bucket), ranks=3):
            assert_equal(result["saved"], whole["saved"])

    def test_travels_once_to_every_rank(self, world):
        """Means, two numbers each, and parts go from one rank to all others."""
        for sent, numbers in world.run(sent_by_state, run(placement=natgrad.MemOpt()), ranks=3):
            assert sum(sent) == 2 * 8 * numbers

    def test_of_ranks_at_different_steps_is_refused(self, world):
        for text in world.run(save_at_different_steps, ranks=2):
            assert text == (
                "Rank 1 has made 4 steps and rank 0 3: save on all ranks after the same step."
            )


def sent_by_state(run):
    training = Training.here(run).steps(0, 3)
    before = training.kfac.comm.traffic.snapshot()
    state = training.kfac.state_dict()
    sent = (training.kfac.comm.traffic - before).sent["state"]
    numbers = sum(
        t.numel()
        for block in state["blocks"].values()
        for group in ("factors", "parts")
        for tensors in block[group].values()
        for t in (tensors.values() if group == "factors" else tensors)
    )
    return training.kfac.comm.gather(sent), numbers


def save_at_different_steps():
    training = Training.here(run()).steps(0, 3)
    training.kfac.steps += training.rank
    with pytest.raises(CheckpointError) as error:
        training.kfac.state_dict()
    return str(error.value)


class TestResumed:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("placement", ["mem", "half", "comm", "scatter"])
    @pytest.mark.parametrize(("layout", "end"), [("plain", 2), ("ddp", 5), ("fsdp", 2)])
    def test_on_the_same_ranks_bit_by_bit(self, world, layout, placement, method, end):
        this = run(layout, **METHODS[method], placement=PLACEMENTS[placement])
        whole = world.run(save, this, end, ranks=2)
        again = world.run(resume, this, whole[0]["saved"], ranks=2)
        for one, other in zip(whole, again, strict=True):
            assert_equal(other["weights"], one["weights"])
            assert_equal(other["again"], one["saved"]["kfac"])

    @pytest.mark.parametrize("name", ["cnn", "lm"])
    @pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
    def test_every_network_bit_by_bit(self, world, layout, name):
        this = run(layout, name)
        whole = world.run(save, this, ranks=3)
        again = world.run(resume, this, whole[0]["saved"], ranks=3)
        for one, other in zip(whole, again, strict=True):
            assert_equal(other["weights"], one["weights"])

    @pytest.mark.parametrize(
        "settings",
        [
            {"refresh_every": natgrad.schedules.Drift(0.05)},
            {"refresh_every": natgrad.schedules.Drift(10.0, at_most=3)},
            {
                "update_every": natgrad.schedules.Doubling(4),
                "refresh_every": natgrad.schedules.Doubling(8),
            },
            {"refresh_every": natgrad.schedules.Staggered(3)},
            {"curvature": natgrad.MonteCarloFisher(samples=2)},
            {"curvature": natgrad.ExactFisher()},
            {"factor_dtype": torch.bfloat16},
            {"wire_dtype": torch.float32},
        ],
        ids=lambda settings: "-".join(settings),
    )
    def test_every_setting_bit_by_bit(self, world, settings):
        this = run("ddp", **settings)
        whole = world.run(save, this, ranks=2)
        again = world.run(resume, this, whole[0]["saved"], ranks=2)
        for one, other in zip(whole, again, strict=True):
            assert_equal(other["weights"], one["weights"])

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ((1, "plain", "auto"), (3, "ddp", "mem")),
            ((4, "fsdp", "half"), (1, "plain", "auto")),
            ((2, "ddp", "comm"), (4, "fsdp", "mem")),
            ((4, "plain", "scatter"), (2, "ddp", "comm")),
            ((3, "ddp", "mem"), (3, "ddp", "comm")),
            ((3, "fsdp", "comm"), (2, "plain", "half")),
            ((2, "ddp", "mem"), (4, "plain", "half")),
        ],
        ids=lambda part: "-".join(map(str, part)),
    )
    def test_on_other_ranks(self, world, before, after, method):
        results = []
        saved = None
        for ranks, layout, placement in (before, after):
            kfac = {**METHODS[method], "placement": PLACEMENTS[placement]}
            this = run(layout, **kfac)
            args = (save, this) if saved is None else (resume, this, saved)
            results = world.run(*args, ranks=ranks)
            saved = saved or results[0]["saved"]
        expected = undisturbed("mlp", method).weights()
        for result in results:
            assert_same(result["weights"], expected)

    @pytest.mark.parametrize("name", ["cnn", "lm"])
    @pytest.mark.parametrize("method", METHODS)
    def test_every_network_on_other_ranks(self, world, name, method):
        before = run("fsdp", name, **METHODS[method], placement=natgrad.MemOpt())
        after = run("ddp", name, **METHODS[method], placement=natgrad.Hybrid(0.5))
        saved = world.run(save, before, ranks=3)[0]["saved"]
        for result in world.run(resume, after, saved, ranks=2):
            assert_same(result["weights"], undisturbed(name, method).weights())

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("placement", ["mem", "half", "comm", "scatter"])
    def test_a_rank_keeps_what_its_plan_says(self, world, placement, method):
        saved = Training(run(**METHODS[method])).steps(0, 5).saved()
        this = run("plain", **METHODS[method], placement=PLACEMENTS[placement])
        for result in world.run(resume, this, saved, ranks=4):
            there = result["held"]
            assert there["running"] == there["kept"]
            assert there["parts"] == there["held"]
            assert result["memory"].get("factors", 0) == result["planned"].factors
            assert result["memory"].get("inverses", 0) == result["planned"].inverses
            assert_equal(result["again"], saved["kfac"])


DRAWN = natgrad.MonteCarloFisher(seed=3)


class TestDraws:
    """Of the Monte-Carlo Fisher: each rank has a generator for its own samples."""

    def test_every_rank_has_its_own_state(self, world):
        (first, *_) = world.run(save, run(curvature=DRAWN), ranks=3)
        states = first["saved"]["kfac"]["generator"]
        assert len({tuple(state.tolist()) for state in states}) == 3

    def test_on_other_ranks_they_are_new_and_always_the_same(self, world):
        (first, *_) = world.run(save, run(curvature=DRAWN), ranks=3)
        old = [tuple(s.tolist()) for s in first["saved"]["kfac"]["generator"]]
        found = []
        for _ in range(2):
            for result in world.run(resume, run(curvature=DRAWN), first["saved"], ranks=2):
                found.append([tuple(s.tolist()) for s in result["again"]["generator"]])
        assert all(states == found[0] for states in found)
        assert len({*old, *found[0]}) == 5


def refused(run, state, damage, damaged):
    """The sentence of each rank, which must have changed nothing."""
    training = Training.here(run).steps(0, 3)
    before = training.kfac.state_dict()
    mine = copy.deepcopy(state)
    if training.rank in damaged:
        damage(mine)
    with pytest.raises(CheckpointError) as error:
        training.kfac.load_state_dict(mine)
    assert_equal(training.kfac.state_dict(), before)
    return str(error.value)


def without_a_mean(state):
    del state["blocks"]["2"]["factors"]["A"]["mean"]


def of_another_shape(state):
    state["blocks"]["0"]["parts"]["G"][0] = torch.zeros(3, 3)


def of_another_step(state):
    state["steps"] = 6


def no_list(state):
    state["blocks"]["2"]["saved"]["factors"] = 3


class TestRefused:
    @pytest.mark.parametrize(
        ("damage", "sentence"),
        [
            (without_a_mean, "The state of block '2', factor A, has no mean: it is damaged"),
            (of_another_shape, "The state of block '0', inverse of G, has shape (3, 3) but (1, 7"),
            (
                no_list,
                "The state of block '2' has 3 as its factors saved: it is damaged",
            ),
        ],
    )
    def test_by_all_where_one_rank_has_a_damaged_one(self, world, damage, sentence):
        state = undisturbed("mlp", "eigen", 3).kfac.state_dict()
        own, other, *_ = texts = world.run(refused, run(), state, damage, [0], ranks=3)
        assert own.startswith(sentence)
        assert other.startswith(f"The state was refused by rank 0: {sentence}")
        assert texts[2] == other

    def test_by_all_where_all_have_a_damaged_one(self, world):
        state = undisturbed("mlp", "eigen", 3).kfac.state_dict()
        texts = world.run(refused, run(), state, without_a_mean, [0, 1], ranks=2)
        assert texts[0].startswith("The state of block '2', factor A, has no mean")
        assert texts[1] == texts[0]

    def test_of_different_steps(self, world):
        state = undisturbed("mlp", "eigen", 3).kfac.state_dict()
        for text in world.run(refused, run(), state, of_another_step, [1], ranks=3):
            assert text == (
                "Rank 1 was given another state, of step 6, than rank 0, of step 3. Load the same "
                "checkpoint on every rank."
            )

    def test_of_another_model(self, world):
        state = undisturbed("cnn", "eigen", 3).kfac.state_dict()
        for text in world.run(refused, run(), state, len, [], ranks=2):
            assert text.startswith("The state is of another model: the model has no 'conv1'")
