"""The loops of others: what is written behind an optimizer, and the table that is made of runs."""

import dataclasses
import json
import math
import warnings

import pytest
import torch
from torch import nn

import natgrad
from benchmarks import others, others_plain, others_text


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def trained(line, steps):
    """A loop in a few lines, whose loss depends on what was written into it."""
    model = network()
    optimizer = line(model, torch.optim.Adam(model.parameters(), lr=0.1), 0.1, 0.01)
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    y = (x[:, 0] > 0).long()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


TINY = {"tiny": others.Loop("a tiny one", "Adam, 0.1", 2, trained)}


def test_each_line_trains_with_what_it_says():
    model = network()
    own = torch.optim.Adam(model.parameters(), lr=0.1)
    line = others.Line("as it is")
    assert line(model, own, 0.1) is own
    assert line.preconditioners == []
    for name, power in (("default", 1.0), ("root", 0.5)):
        line = others.Line(name)
        assert line(model, own, 0.1) is own
        (kfac,) = line.preconditioners
        assert kfac.attachment is not None
        assert kfac.preconditioning.motion.geometry == natgrad.geometry.Euclidean(power)
        kfac.detach()
    line = others.Line("dogleg")
    assert line(model, own, 0.1) is own
    assert line.preconditioners[0].team.motion.length == natgrad.lengths.Dogleg(2.0)
    line.preconditioners[0].detach()
    line = others.Line("in its place")
    optimizer = line(model, own, 0.1, 0.01)
    assert isinstance(optimizer, natgrad.NaturalMuon)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.1, 0.01)


def test_twice_the_rate_whatever_the_loop_sets():
    """In each step, and it finds what it has set afterwards."""
    found = []
    for line, factor in (("as it is", 2.0), ("twice the rate", 1.0)):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = others.Line(line)(model, optimizer, 0.1)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
        for step in range(3):
            optimizer.param_groups[0]["lr"] = factor * 0.01 * (step + 1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == factor * 0.01 * (step + 1)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_a_run_repeats_and_its_lines_differ():
    first, again = (others.run("tiny", TINY["tiny"], "default", 3, 3) for _ in range(2))
    assert first.loss == again.loss
    losses = {line: others.run("tiny", TINY["tiny"], line, 3, 3).loss for line in others.LINES}
    assert len(set(losses.values())) == len(others.LINES)


def test_a_run_keeps_what_natgrad_has_said():
    """At a damping that hides the curvature; what others say is not of interest."""

    def train(line, steps):
        warnings.warn("of another library", FutureWarning, stacklevel=2)
        return trained(line, steps)

    loop = others.Loop("one", "Adam", 60, train, extra={"damping": 1e4})
    found = others.run("one", loop, "default", 1, 60)
    assert len(found.said) == 1
    assert found.said[0].startswith("After 50 steps K-FAC may not work as it should")
    assert any("hardly turned" in problem for problem in found.problems)
    assert others.run("one", loop, "as it is", 1, 2).said == []


def run(line, seed, loss, seconds=1.0):
    return others.Run("tiny", line, seed, 2, loss, seconds)


def test_the_table_has_medians_and_marks_what_is_worse():
    runs = [run("as it is", s, loss) for s, loss in ((1, 1.0), (2, 1.5), (3, 1.25))]
    runs += [run("default", s, loss) for s, loss in ((1, 1.1), (2, 1.2), (3, 1.3))]
    runs += [run("root", s, 1.3) for s in (1, 2, 3)]
    rows = others.table(runs, TINY).splitlines()
    assert rows[0] == "| loop | its optimizer | steps | seeds | as it is | default | root |"
    assert rows[-1] == (
        "| a tiny one | Adam, 0.1 | 2 | 3 | 1.25 (1 to 1.5) | 1.2 (1.1 to 1.3) "
        "| **1.3** (1.3 to 1.3) |"
    )


def test_lines_are_compared_on_the_seeds_that_both_have():
    runs = [run("as it is", 1, 1.0), run("as it is", 2, 9.0), run("as it is", 3, 9.0)]
    assert "**1.1**" in others.table([*runs, run("default", 1, 1.1)], TINY)


def test_a_run_that_fails_is_worse():
    runs = [run("as it is", 1, 1.0), run("default", 1, math.inf)]
    assert "**inf**" in others.table(runs, TINY)


def test_costs_are_relative_to_the_loop_as_it_is():
    runs = [run("as it is", 1, 1.0, 4.0), run("root", 1, 1.0, 6.0)]
    assert others.costs(runs, TINY).splitlines()[-1] == "| a tiny one | 2 s | 1.50x |"


def test_runs_are_kept_read_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(others, "all_loops", lambda: TINY)
    kept, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text("before\n<!-- others -->\n<!-- /others -->\nafter\n", encoding="utf-8")
    given = ["--lines", "as it is", "default", "--json", str(kept)]
    others.main([*given, "--seeds", "1"])
    others.main([*given, "--seeds", "1", "2"])  # of what was repeated the last counts
    assert len(kept.read_text(encoding="utf-8").splitlines()) == 6
    assert len(others.read(kept)) == 4
    capsys.readouterr()
    others.main(["--read", str(kept), "--write", "others", "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "| a tiny one | Adam, 0.1 | 2 | 2 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert json.loads(kept.read_text(encoding="utf-8").splitlines()[0])["line"] == "as it is"


def test_a_loop_whose_packages_are_missing_is_said_to_be_left_out(monkeypatch, capsys):
    without = dataclasses.replace(TINY["tiny"], needs=("a_package_that_nobody_has",))
    monkeypatch.setattr(others, "all_loops", lambda: {"tiny": without})
    others.main([])
    assert "tiny: not trained, as a_package_that_nobody_has is not installed" in (
        capsys.readouterr().out
    )


def test_the_frechet_distance_of_gaussians():
    """Of shifted and stretched samples it is known: the means' distance, and that of the roots."""
    torch.manual_seed(0)
    x = torch.randn(500, 3, dtype=torch.float64)
    assert others_plain.frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert others_plain.frechet_distance(x, x + 2) == pytest.approx(12)
    spread = float(torch.cov(x.T).trace())
    wider = x.mean(0) + 3 * (x - x.mean(0))
    assert others_plain.frechet_distance(x, wider) == pytest.approx(4 * spread)


def test_networks_of_the_gan_have_the_shapes_of_the_original():
    image = others_plain.generator()(torch.randn(2, others_plain.NOISE, 1, 1))
    assert image.shape == (2, 1, 64, 64)
    assert others_plain.discriminator()(image).shape == (2,)


def test_other_networks_of_pytorch_examples_have_their_shapes():
    digits = others_plain.Digits()
    assert digits(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in digits.parameters()) == 1_199_882  # as the original has
    found, mean, logarithm = others_plain.VAE()(torch.rand(2, 784))
    assert found.shape == (2, 784)
    assert mean.shape == logarithm.shape == (2, 20)


def test_batches_are_epochs_of_whole_batches():
    torch.manual_seed(0)
    found = others_plain.batches(10, 4, 5)
    assert [len(rows) for rows in found] == [4] * 5
    assert len(set(torch.cat(found[:2]).tolist())) == 8


def test_words_are_labelled_by_the_mark_that_follows():
    class Cut:
        number = {"[CLS]": 1, "[SEP]": 2}  # noqa: RUF012

        def encode(self, word):
            return list(range(10, 10 + len(word)))

    text = "= Heading =\nso it is , as I said . and so on we go to an end now ok\n"
    (sample,) = others_text.sentences(text, Cut(), 5, longest=16)
    skip = others_text.IGNORED
    assert sample["labels"].tolist() == [skip, 0, skip, 0, skip, 1, skip, 0, skip, 0, 2] + [
        skip
    ] * 3 + [skip]
    padded = others_text.padded([sample, {k: v[:4] for k, v in sample.items()}])
    assert padded["attention_mask"].sum(1).tolist() == [15, 4]
    assert padded["labels"][1, 4:].tolist() == [skip] * 11
