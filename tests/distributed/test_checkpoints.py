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

END = 7  # the last step updates and refreshes
SAVED = {"plain": 2, "ddp": 5, "fsdp": 2}  # after as many steps


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
    def test_is_that_of_one_process(self, world, ranks, layout, placement, name):
        kfac = {"placement": PLACEMENTS[placement]}
        runs = {method: run(layout, name, **METHODS[method], **kfac) for method in METHODS}
        for method, results in world.each(save, calls(runs), ranks=ranks).items():
            expected = Training(run(name=name, **METHODS[method])).steps(0, 5).kfac.state_dict()
            first = results[0]["saved"]["kfac"]
            assert shapes(first) == shapes(expected), method
            for result in results[1:]:
                assert_equal(result["saved"]["kfac"], first, method)
            for block_name, block in expected["blocks"].items():
                found = first["blocks"][block_name]
                for factor, running in block["factors"].items():
                    assert_close(found["factors"][factor].values(), running.values())
                if method != "ekfac":  # whose S is in a basis whose vectors have no sign
                    same_curvature(found["parts"], block["parts"])

    def test_travels_in_small_pieces(self, world):
        settings = {"placement": natgrad.MemOpt()}
        runs = {"whole": run(**settings)}
        runs |= {size: run(**settings, bucket_bytes=size) for size in (1, 64, 1000)}
        found = world.each(save, calls(runs), ranks=3)
        for size, results in found.items():
            for result in results:
                assert_equal(result["saved"], found["whole"][0]["saved"], str(size))

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
    @pytest.mark.parametrize("layout", SAVED)
    def test_on_the_same_ranks_bit_by_bit(self, world, layout):
        """Each placement with the next method; of three layouts, with all of them."""
        turn = list(SAVED).index(layout)
        runs = {}
        for index, placement in enumerate(["mem", "half", "comm", "scatter"]):
            method = list(METHODS)[(index + turn) % len(METHODS)]
            this = run(layout, **METHODS[method], placement=PLACEMENTS[placement])
            runs[placement, method] = this
        bit_by_bit(world, runs, 2, SAVED[layout])

    @pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
    def test_every_network_bit_by_bit(self, world, layout):
        bit_by_bit(world, {name: run(layout, name) for name in ("cnn", "lm")}, 3)

    def test_every_setting_bit_by_bit(self, world):
        settings = [
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
        ]
        bit_by_bit(world, {str(each): run("ddp", **each) for each in settings}, 2)

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
    def test_on_other_ranks(self, world, before, after):
        saved = {}
        for turn, (ranks, layout, placement) in enumerate((before, after)):
            kfac = {"placement": PLACEMENTS[placement]}
            runs = {method: run(layout, **METHODS[method], **kfac) for method in METHODS}
            if turn == 0:
                saved = saved_by(world.each(save, calls(runs), ranks=ranks))
            else:
                results = world.each(resume, calls(runs, saved), ranks=ranks)
        for method, each in results.items():
            for result in each:
                assert_same(result["weights"], undisturbed("mlp", method).weights(), method)

    @pytest.mark.parametrize("name", ["cnn", "lm"])
    def test_every_network_on_other_ranks(self, world, name):
        before, after = (
            {
                method: run(layout, name, **METHODS[method], placement=placement)
                for method in METHODS
            }
            for layout, placement in (("fsdp", natgrad.MemOpt()), ("ddp", natgrad.Hybrid(0.5)))
        )
        saved = saved_by(world.each(save, calls(before), ranks=3))
        for method, results in world.each(resume, calls(after, saved), ranks=2).items():
            for result in results:
                assert_same(result["weights"], undisturbed(name, method).weights(), method)

    def test_a_rank_keeps_what_its_plan_says(self, world):
        each = {method: Training(run(**METHODS[method])).steps(0, 5).saved() for method in METHODS}
        runs = {
            (placement, method): run("plain", **METHODS[method], placement=PLACEMENTS[placement])
            for placement in ("mem", "half", "comm", "scatter")
            for method in METHODS
        }
        saved = {key: each[key[1]] for key in runs}
        for key, results in world.each(resume, calls(runs, saved), ranks=4).items():
            for result in results:
                there = result["held"]
                assert there["running"] == there["kept"], key
                assert there["parts"] == there["held"], key
                assert result["memory"].get("factors", 0) == result["planned"].factors, key
                assert result["memory"].get("inverses", 0) == result["planned"].inverses, key
                assert_equal(result["again"], saved[key]["kfac"])


def calls(runs, saved=None):
    return {key: (one,) if saved is None else (one, saved[key]) for key, one in runs.items()}


def saved_by(results):
    return {key: each[0]["saved"] for key, each in results.items()}


def bit_by_bit(world, runs, ranks, end=5):
    """Other processes go on from what some have saved; each of ``runs`` in the same ones."""
    whole = world.each(save, {key: (one, end) for key, one in runs.items()}, ranks=ranks)
    again = world.each(resume, calls(runs, saved_by(whole)), ranks=ranks)
    for key in runs:
        for one, other in zip(whole[key], again[key], strict=True):
            assert_equal(other["weights"], one["weights"], str(key))
            assert_equal(other["again"], one["saved"]["kfac"], str(key))


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
