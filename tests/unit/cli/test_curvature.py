"""`natgrad curvature` prints what the operators say, draws it, and is clear about bad input."""

import io
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import forked
from natgrad import EmpiricalFisher, Kronecker, MonteCarloFisher, fisher, ggn, hessian, measures
from natgrad.cli import measure_tables
from natgrad.cli.main import app
from natgrad.lab.report import quality
from natgrad.operators import Problem
from unit.cli import problem as curved

NET, DATA = "unit.cli.problem:net", "unit.cli.problem:separable"


@pytest.fixture
def problem():
    """What the command makes of NET and DATA."""
    torch.manual_seed(0)
    model = curved.net().double().eval()
    batches = [(x.double(), y) for x, y in curved.separable()]
    return Problem(model, F.cross_entropy, batches)


@pytest.fixture
def double(monkeypatch):
    """The data in float64, as the command line cannot ask a function for them."""
    batches = [(x.double(), y) for x, y in curved.separable()]
    monkeypatch.setattr(curved, "separable", lambda: batches)


def run(natgrad, *options, code=0):
    said = natgrad("curvature", *options)
    assert said.code == code, said.err
    return said


def rows(text, title):
    """The table under a title, as lists of cells."""
    lines = text[text.index(title) :].splitlines()
    rule = next(i for i, line in enumerate(lines) if "─" in line)
    found = []
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        found.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return found


def test_the_tables_are_those_of_the_operators(natgrad, problem, double):
    said = run(
        natgrad, NET, DATA, "--double", "--matrix", "hessian,ggn,empirical", "--damping", "0.01"
    )
    assert not said.err
    ((samples, parameters, loss, norm, share),) = rows(said.out, f"{NET} on {DATA}")
    assert (samples, parameters) == ("30", "39")
    assert float(loss) == pytest.approx(problem.value(), rel=1e-5)
    assert float(norm) == pytest.approx(float(problem.gradient().norm()), rel=1e-5)
    x, y = (torch.cat(parts) for parts in zip(*curved.separable(), strict=True))
    assert float(share) == pytest.approx(float((problem.model(x).argmax(1) == y).double().mean()))
    sizes = {cells[0]: cells[1] for cells in rows(said.out, "Sizes of a matrix over 39")}
    assert sizes["full"] == "1,521"
    assert sizes["Kronecker"] == str(16 + 36 + 9 + 25)
    made = {
        "H": hessian(problem),
        "G": ggn(problem),
        "C": fisher(problem, curvature=EmpiricalFisher()),
    }
    found = rows(said.out, "\nMatrices")
    assert [cells[0] for cells in found] == list(made)
    for cells, operator in zip(found, made.values(), strict=True):
        dense = operator.dense()
        values = torch.linalg.eigvalsh(dense)
        assert float(cells[2]) == pytest.approx(float(dense.trace()), rel=1e-5)
        assert float(cells[3]) == pytest.approx(float(values[-1]), rel=1e-5)
        assert float(cells[5]) == pytest.approx(float(dense.norm()), rel=1e-5)
        if cells[0] == "H":
            assert float(cells[4]) == pytest.approx(float(values[0]), rel=1e-2)
            assert cells[6] == "indefinite"
        else:
            assert float(cells[6]) == pytest.approx(float(values[-1]) / 0.01 + 1, rel=1e-2)
    layers = rows(said.out, "\nLayers")
    assert [cells[:4] for cells in layers] == [
        ["0", "Linear", "4 × 6", "24"],
        ["2", "Linear", "3 × 5", "15"],
    ]
    assert sum(float(cells[4]) for cells in layers) == pytest.approx(float(found[0][2]), rel=1e-4)
    assert "Measures" not in said.out


def test_structures_and_drawn_targets(natgrad, problem, double):
    said = run(
        *(natgrad, NET, DATA, "--double", "--matrix", "fisher,mc", "--draws", "3"),
        *("--structure", "full,kronecker,block,unitwise,diagonal,ekfac,kronecker-reduce"),
    )
    found = rows(said.out, "\nMatrices")
    assert len(found) == 14
    kronecker = fisher(problem, structure=Kronecker())
    cells = next(cells for cells in found if cells[:2] == ["F", "kronecker"])
    assert float(cells[2]) == pytest.approx(float(kronecker.trace()), rel=1e-5)
    assert float(cells[3]) == pytest.approx(float(kronecker.eigenvalues(1).values), rel=1e-5)
    traces = {tuple(cells[:2]): float(cells[2]) for cells in found}
    assert traces["F", "diagonal"] == pytest.approx(traces["F", "full"], rel=1e-5)
    assert traces["F_mc", "block"] == pytest.approx(traces["F_mc", "full"], rel=1e-5)
    drawn = fisher(problem, curvature=MonteCarloFisher(3, seed=0))
    assert traces["F_mc", "full"] == pytest.approx(float(drawn.trace()), rel=1e-5)


def test_everything_as_json(natgrad, problem, double, tmp_path):
    file = tmp_path / "numbers.json"
    said = run(
        *(natgrad, NET, DATA, "--double", "--matrix", "hessian", "--eigenvalues", "4"),
        *("--measures", "noise,tic", "--json", str(file)),
    )
    assert f"All numbers are in {file}." in said.out
    found = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert found["samples"] == 30
    assert found["loss"] == pytest.approx(problem.value())
    (matrix,) = found["matrices"]
    values = torch.linalg.eigvalsh(hessian(problem).dense()).flip(0)
    assert matrix["largest"]["values"] == pytest.approx(values[:4].tolist())
    assert matrix["largest"]["converged"] is True
    assert max(matrix["largest"]["residuals"]) < 1e-10
    assert matrix["condition"] is None  # infinite, which JSON does not know
    assert matrix["trace"]["value"] == pytest.approx(float(values.sum()))
    assert matrix["trace"]["standard_error"] == 0
    assert matrix["trace"]["method"].startswith("exact")
    noise = measures.noise_scale(problem)
    assert found["measures"]["B_simple"]["value"] == pytest.approx(noise.simple)
    assert found["measures"]["B_noise"]["value"] == pytest.approx(float(noise.curved))
    tic = measures.tic(problem, matrix=ggn, damping=1e-3)
    assert found["measures"]["TIC"]["value"] == pytest.approx(float(tic))


def test_all_measures_have_a_line(natgrad):
    said = run(natgrad, "small-mlp", "digits", "--samples", "40", "--measures", "all")
    text = said.out[said.out.index("\nMeasures") :]
    for name in (
        *("B_simple", "B_noise", "TIC", "Fisher-Rao norm", "sharpness", "largest rise"),
        *("gradient variance", "path norm", "Lipschitz bound", "spectral complexity"),
    ):
        assert name in text
    assert "weight noise" in text or "pac-bayes" in text


def test_a_hessian_is_made_once(natgrad, monkeypatch):
    monkeypatch.setattr(measure_tables, "hessian", pytest.fail)
    run(natgrad, NET, DATA, "--matrix", "hessian", "--measures", "noise,sharpness")
    run(natgrad, NET, DATA, "--matrix", "ggn", "--measures", "fisher-rao")  # which needs none


def test_a_measure_that_does_not_exist_here_says_why(natgrad):
    said = run(natgrad, NET, DATA, "--measures", "path-norm,variance")
    lines = {cells[0]: cells[1:] for cells in rows(said.out, "\nMeasures")}
    assert lines["path-norm"][0] == "–"
    assert "anh" in lines["path-norm"][1]
    assert float(lines["gradient variance"][0]) > 0


def test_large_models_are_estimated(natgrad, monkeypatch):
    for module in ("dense_cache", "matrix_tables"):
        monkeypatch.setattr(f"natgrad.lab.report.{module}.SMALL", 10)
    monkeypatch.setattr(measure_tables, "SMALL", 10)
    said = run(natgrad, NET, DATA, "--matrix", "hessian", "--measures", "noise,tic")
    assert "±" in rows(said.out, "\nMatrices")[0][2]
    lines = {cells[0]: cells[1:] for cells in rows(said.out, "\nMeasures")}
    assert "±" in lines["B_noise"][0]
    assert "Kronecker" in lines["TIC"][1]


def test_pictures(natgrad, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "some" / "pictures"
    said = run(
        *(natgrad, NET, DATA, "--structure", "full,kronecker", "--plots", str(folder)),
        *("--eigenvalues", "3"),
    )
    names = ["spectra.png", "layers.png", "blocks.png"]
    assert f"The pictures are in {folder}: {', '.join(names)}." in said.out
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_quality_at_two_accuracies(natgrad, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "numbers.json"
    said = run(
        *(natgrad, NET, DATA, "--matrix", "ggn", "--quality", "--target-accuracy", "0.6"),
        *("--plots", str(tmp_path), "--json", str(file)),
    )
    found = json.loads(file.read_text(encoding="utf-8"))
    before, after = found["quality"]
    assert float(before["label"].split()[1]) == pytest.approx(found["accuracy"], abs=0.01)
    assert float(after["label"].split()[1]) >= 0.6
    assert 0 < found["training steps"] < 500
    assert len(before["cells"]) == 24
    for one in (before, after):
        assert f"Approximations at {one['label']}" in said.out
    assert (tmp_path / "quality.png").exists()
    assert (tmp_path / "quality-fisher.png").exists()
    # The weights that everything else is about are those before the training.
    again = run(natgrad, NET, DATA, "--matrix", "ggn")
    assert rows(again.out, "\nMatrices") == rows(said.out, "\nMatrices")


def test_some_parameters(natgrad, tmp_path):
    file = tmp_path / "numbers.json"
    said = run(
        *(natgrad, NET, DATA, "--parameters", "2.*", "--matrix", "ggn", "--json", str(file)),
        *("--quality", "--target-accuracy", "0.6"),
    )
    assert "Sizes of a matrix over 15 parameters" in said.out
    assert [cells[0] for cells in rows(said.out, "\nLayers")] == ["2"]
    assert len(json.loads(file.read_text(encoding="utf-8"))["quality"]) == 2
    said = run(natgrad, NET, DATA, "--parameters", "head.*", code=2)
    assert "parameters has 'head.*', which matches none" in said.err


def test_weights_of_a_checkpoint(natgrad, tmp_path, problem, double):
    """In the precision that they have."""
    file = tmp_path / "weights.pt"
    torch.manual_seed(5)
    model = curved.net().double()
    torch.save({"model": model.state_dict()}, file)
    run(
        *(natgrad, NET, DATA, "--double", "--checkpoint", str(file), "--matrix", "ggn"),
        *("--json", str(tmp_path / "numbers.json")),
    )
    found = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    problem.model.load_state_dict(model.state_dict())
    assert found["loss"] == pytest.approx(problem.value(), rel=1e-12)


@pytest.mark.parametrize("loss", ["square", "binary"])
def test_losses_without_classes(natgrad, loss):
    said = run(natgrad, NET, "random", "--sample", "5", "--loss", loss, "--matrix", "fisher,mc")
    assert "accuracy" not in said.out
    assert len(rows(said.out, "\nMatrices")) == 2


def test_a_model_without_known_layers(natgrad):
    said = run(natgrad, "unit.cli.problem:bare", DATA, "--matrix", "hessian,ggn")
    assert [cells[0] for cells in rows(said.out, "\nLayers")] == ["scale", "shift"]
    said = run(natgrad, "unit.cli.problem:bare", DATA, "--structure", "kronecker", code=2)
    assert len(said.err.strip().splitlines()) == 1


def test_a_model_in_training_mode_is_evaluated(natgrad):
    said = run(natgrad, "unit.cli.problem:scaled", DATA, "--matrix", "ggn")
    assert "BatchNorm1d" in said.out


def test_a_loss_of_one_s_own(natgrad):
    own = run(natgrad, NET, DATA, "--loss", "unit.cli.problem:mean_loss", "--matrix", "hessian")
    known = run(natgrad, NET, DATA, "--matrix", "hessian")
    assert rows(own.out, "\nMatrices")[0][2:4] == rows(known.out, "\nMatrices")[0][2:4]
    assert "accuracy" not in own.out


def test_the_seed_is_that_of_the_weights(natgrad):
    one, same, other = (
        run(natgrad, NET, DATA, "--matrix", "ggn", "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("nothing", "digits"), "There is no network 'nothing': name one of convnet, "),
        ((NET, "nothing"), "There are no data 'nothing': name digits, random, a file that ends "),
        ((NET, DATA, "--loss", "hinge"), "There is no loss 'hinge': name one of cross-entropy, "),
        ((NET, DATA, "--matrix", "ntk"), "--matrix has 'ntk': name some of hessian, ggn, fisher, "),
        ((NET, DATA, "--matrix", ""), "--matrix has '': name some of hessian, "),
        ((NET, DATA, "--structure", "kfac"), "--structure has 'kfac': name some of full, block, "),
        ((NET, DATA, "--measures", "width"), "--measures has 'width': name some of all, noise, "),
        ((NET, "random"), f"Network '{NET}' does not say what its inputs are: pass the shape "),
        ((NET, "random", "--sample", "x"), "--sample is 'x', which is no shape: write the "),
        (
            (NET, DATA, "--loss", "unit.cli.problem:total_loss"),
            "The loss of ",
        ),
        ((NET, "unit.cli.problem:empty"), "data is empty, so there is nothing to average over: "),
        (
            (NET, "unit.cli.problem:failing"),
            "DATA 'unit.cli.problem:failing' could not be made (OSError: the disk is gone): name ",
        ),
        (
            (NET, DATA, "--quality", "--target-accuracy", "1.5"),
            "--target-accuracy is 1.5 but must be at most 1: pass a share such as 0.9.",
        ),
        (
            (NET, DATA, "--quality", "--target-accuracy", "0"),
            "--target-accuracy is 0 but the model is at ",
        ),
        (
            (NET, DATA, "--quality", "--loss", "unit.cli.problem:mean_loss"),
            "--quality trains to an accuracy but OwnLoss has none: pass --loss cross-entropy, or ",
        ),
        ((NET, DATA, "--quality", "--damping", "0"), "damping is 0.0 but must be above 0, as "),
        ((NET, DATA, "--json", "nowhere/a.json"), "--json is nowhere/a.json but there is no "),
        (
            (NET, DATA, "--checkpoint", "nowhere.pt"),
            "--checkpoint nowhere.pt cannot be read (there is no such file): name a file that ",
        ),
    ],
)
def test_bad_input_is_one_sentence(natgrad, options, sentence):
    said = run(natgrad, *options, code=2)
    assert said.err.startswith(f"natgrad: {sentence}")
    assert len(said.err.strip().splitlines()) == 1
    assert "Matrices" not in said.out


def test_too_large_for_quality_is_said_first(natgrad, monkeypatch):
    monkeypatch.setattr(quality, "LARGEST", 10)
    said = run(natgrad, NET, DATA, "--quality", code=2)
    assert "full matrices are compared up to 10 parameters" in said.err
    assert not said.out


def test_an_accuracy_out_of_reach(natgrad, monkeypatch):
    monkeypatch.setattr("natgrad.cli.findings.train", lambda problem, target: (problem, 7))
    said = run(natgrad, NET, DATA, "--matrix", "ggn", "--quality", code=2)
    assert "--target-accuracy is 0.9 but after 500 steps the model is at 0." in said.err


def test_plots_where_a_file_stands(natgrad, tmp_path):
    (tmp_path / "a").write_text("")
    said = run(natgrad, NET, DATA, "--plots", str(tmp_path / "a"), code=2)
    assert said.err.startswith(f"natgrad: --plots {tmp_path / 'a'} cannot be made a folder (")


def test_without_matplotlib_it_is_said_first(natgrad, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = run(natgrad, NET, DATA, "--plots", str(tmp_path), code=2)
    assert said.err.strip() == (
        "natgrad: Pictures need matplotlib, which is not installed: pip install 'natgrad[report]'."
    )
    assert not said.out


def test_help_fits_a_screen_and_has_an_example():
    said = CliRunner().invoke(app, ["curvature", "--help"], env={"COLUMNS": "100"})
    assert said.exit_code == 0
    assert len(said.output.splitlines()) <= 42
    assert "natgrad curvature small-cnn digits --matrix" in said.output
    for option in (
        *("--checkpoint", "--loss", "--matrix", "--structure", "--samples", "--batch-size"),
        *("--damping", "--eigenvalues", "--measures", "--plots", "--json", "--seed", "--quality"),
        *("--target-accuracy", "--draws", "--sample", "--double", "--parameters"),
    ):
        assert option in said.output
    for word in (*measure_tables.NAMES, "kronecker-reduce", "empirical", "module:function"):
        assert word in said.output


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_standard_error(natgrad, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    said = run(natgrad, NET, DATA, "--matrix", "ggn", "--measures", "variance")
    for what in ("Looking at the model", "Loss and gradient", "Matrices", "Measures"):
        assert what in sys.stderr.getvalue()
    assert "Looking at the model" not in said.out


@pytest.mark.slow
def test_as_a_process():
    """Which says nothing of its progress to what is no terminal."""
    options = ["--samples", "20", "--matrix", "ggn"]
    said = forked.run(forked.command, "curvature", "small-mlp", "digits", *options)
    assert said.code == 0, said.err
    assert "small-mlp on digits" in said.out
    assert not said.err
