"""Running mixup against its equations, and its shares against the Beta distribution."""

import pytest
import torch

from natgrad.errors import CheckpointError, SettingError
from natgrad.lab.schemes import RunningMixup, one_hot


def batch(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 2, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(4, (n,), generator=generator)


def mixups(alpha=0.4, seed=0, **settings):
    return RunningMixup(alpha, 4, torch.Generator().manual_seed(seed), **settings)


def test_every_batch_is_mixed_with_the_mixed_one_before():
    """Eqs. 9 and 10, with the shares of one that draws the same."""
    mixup, same, n = mixups(), mixups(), 6
    inputs, targets = mixup(*batch(n))
    assert torch.equal(inputs, batch(n)[0])
    for step in range(1, 5):
        x, y = batch(n, step)
        share = same._shares(n)
        inputs = share[:, None, None] * x + (1 - share[:, None, None]) * inputs
        targets = share[:, None] * one_hot(y, 4) + (1 - share[:, None]) * targets
        found_inputs, found_targets = mixup(x, y)
        torch.testing.assert_close(found_inputs, inputs, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found_targets, targets, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found_targets.sum(1), torch.ones(n, dtype=torch.float64))


def test_three_steps_by_hand():
    """With the shares of each step given."""
    mixup = mixups()
    given = iter([[0.25, 0.5], [0.75, 1.0]])
    mixup._shares = lambda n: torch.tensor(next(given), dtype=torch.float64)
    first, y = mixup(torch.tensor([[8.0], [16.0]]), torch.tensor([0, 1]))
    assert first.tolist() == [[8.0], [16.0]]
    assert y.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    second, y = mixup(torch.tensor([[4.0], [0.0]]), torch.tensor([2, 2]))
    assert second.tolist() == [[0.25 * 4 + 0.75 * 8], [8.0]]
    assert y.tolist() == [[0.75, 0, 0.25, 0], [0, 0.5, 0.5, 0]]
    third, y = mixup(torch.tensor([[3.0], [5.0]]), torch.tensor([0, 3]))
    assert third.tolist() == [[0.75 * 3 + 0.25 * 7], [5.0]]
    assert y.tolist() == [[0.75 + 0.25 * 0.75, 0, 0.25 * 0.25, 0], [0, 0, 0, 1]]


def shares_of(mixup, n):
    """λ of n samples: ones mixed with zeros."""
    labels = torch.zeros(n, dtype=torch.long)
    mixup(torch.zeros(n, 1, dtype=torch.float64), labels)
    inputs, _ = mixup(torch.ones(n, 1, dtype=torch.float64), labels)
    return inputs[:, 0]


@pytest.mark.parametrize("alpha", [0.4, 0.6, 1.0, 3.0])
def test_shares_are_beta(alpha):
    """Moments within four standard errors: mean 1/2, E[(λ-½)²] and E[(λ-½)⁴] of Beta(α, α)."""
    n = 40_000
    away = shares_of(mixups(alpha), n) - 0.5
    second = 0.25 / (2 * alpha + 1)
    fourth = 3 * second**2 * (2 * alpha + 1) / (2 * alpha + 3)
    sixth = 15 * second**3 * (2 * alpha + 1) ** 2 / ((2 * alpha + 3) * (2 * alpha + 5))
    eighth = sixth * 7 / (4 * (2 * alpha + 7))
    for power, expected, square in ((1, 0.0, second), (2, second, fourth), (4, fourth, eighth)):
        error = ((square - expected**2) / n) ** 0.5
        assert abs(float((away**power).mean()) - expected) < 4 * error
    assert abs(float((away**3).mean())) < 4 * (sixth / n) ** 0.5


def test_mostly_new():
    plain, new = shares_of(mixups(), 1000), shares_of(mixups(mostly_new=True), 1000)
    assert torch.equal(new, torch.maximum(plain, 1 - plain))


def test_the_running_average_forgets():
    """After t steps the first batch has the share Π (1 - λ), on average 2^-t."""
    mixup, n = mixups(1.0), 20_000
    labels = torch.zeros(n, dtype=torch.long)
    left, _ = mixup(torch.ones(n, 1, dtype=torch.float64), labels)
    for step in range(1, 4):
        left, _ = mixup(torch.zeros(n, 1, dtype=torch.float64), labels)
        error = ((3.0**-step - 4.0**-step) / n) ** 0.5  # E[(1-λ)²] = 1/3
        assert abs(float(left.mean()) - 2.0**-step) < 4 * error


def test_batches_of_other_sizes():
    mixup = mixups()
    mixup._shares = lambda n: torch.full((n,), 0.5)
    labels = torch.tensor([0, 1, 2])
    mixup(torch.tensor([[0.0], [2.0], [4.0]]), labels)
    smaller, _ = mixup(torch.tensor([[0.0], [0.0]]), labels[:2])
    assert smaller.tolist() == [[0.0], [1.0]]
    larger, targets = mixup(torch.zeros(5, 1), torch.tensor([3, 3, 3, 3, 3]))
    assert larger.flatten().tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert torch.equal(targets[0], targets[2])
    assert len(mixup(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))[0]) == 0
    assert mixup(torch.ones(2, 1), labels[:2])[0].tolist() == [[1.0], [1.0]]


def test_resume_is_bit_identical(tmp_path):
    generator = torch.Generator().manual_seed(5)
    mixup = RunningMixup(0.4, 4, generator)
    for seed in range(3):
        mixup(*batch(seed=seed))
    torch.save([mixup.state_dict(), generator.get_state()], tmp_path / "state.pt")
    expected = [mixup(*batch(seed=seed)) for seed in range(3, 6)]
    state, numbers = torch.load(tmp_path / "state.pt", weights_only=True)
    generator = torch.Generator()
    generator.set_state(numbers)
    mixup = RunningMixup(0.4, 4, generator)
    mixup.load_state_dict(state)
    for seed, (inputs, targets) in zip(range(3, 6), expected, strict=True):
        found = mixup(*batch(seed=seed))
        assert torch.equal(found[0], inputs)
        assert torch.equal(found[1], targets)


def test_torch_seeds_it_by_default():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(shares_of(RunningMixup(0.4, 4), 10))
    assert torch.equal(*found)
    assert not torch.equal(found[0], shares_of(RunningMixup(0.4, 4), 10))


def test_a_batch_changed_in_place_does_not_change_the_next():
    one, other = mixups(), mixups()
    for seed in range(3):
        inputs, _ = one(*batch(seed=seed))
        expected, _ = other(*batch(seed=seed))
        assert torch.equal(inputs, expected)
        inputs.zero_()


def test_distributions_and_positions():
    inputs = torch.randn(2, 3, 4, 4)
    mixup = mixups()
    for _ in range(2):
        _, targets = mixup(inputs, torch.randint(4, (2, 4, 4)))
        assert targets.shape == (2, 4, 4, 4)
    mixup.reset()
    soft = torch.randn(2, 4).softmax(1)
    assert torch.equal(mixup(inputs, soft)[1], soft)


def test_no_graph_is_kept():
    inputs = torch.randn(2, 3, requires_grad=True)
    mixup = mixups()
    for _ in range(2):
        assert not mixup(inputs * 2, torch.tensor([0, 1]))[0].requires_grad


def test_errors():
    for alpha in (0, -1, "0.4"):
        with pytest.raises(
            SettingError, match=r"RunningMixup.alpha is .* but must be finite and a"
        ):
            RunningMixup(alpha, 4)
    with pytest.raises(SettingError, match=r"RunningMixup.classes is 0 but must be a whole number"):
        RunningMixup(0.4, 0)
    with pytest.raises(SettingError) as error:
        RunningMixup(0.4, 4, _Elsewhere())
    assert str(error.value) == (
        "RunningMixup.generator is on cuda:0 but must be on the CPU, where the few numbers of a "
        "batch are drawn: pass torch.Generator()."
    )
    mixup = mixups()
    with pytest.raises(SettingError) as error:
        mixup(torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0, 1]))
    assert str(error.value) == (
        "inputs are of dtype torch.uint8 but must be floating-point to be mixed: convert them "
        "first, as in images.float() / 255."
    )
    with pytest.raises(SettingError) as error:
        mixup(torch.zeros(2, 3), torch.tensor([0, 1, 2]))
    assert str(error.value) == (
        "There are 2 inputs and 3 targets but must be as many of one as of the other: pass those "
        "of one batch."
    )
    with pytest.raises(SettingError, match=r"of shape \[2, 5\] but must be \[n, 4, …\]: pass"):
        mixup(torch.zeros(2, 3), torch.zeros(2, 5))
    mixup(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(SettingError) as error:
        mixup(torch.zeros(2, 4), torch.tensor([0, 1]))
    assert str(error.value) == (
        "The inputs of a sample are of shape [4] but were of shape [3] in the batch before, with "
        "which they are mixed: make them of one size, or call reset() between the two."
    )
    with pytest.raises(CheckpointError) as error:
        mixup.load_state_dict({"x": None})
    assert str(error.value) == (
        "The state of a RunningMixup has the entries ['x'] but must have 'inputs' and 'targets': "
        "pass what its state_dict() returned."
    )


class _Elsewhere:
    """Stands in for a generator of an accelerator."""

    device = torch.device("cuda:0")
