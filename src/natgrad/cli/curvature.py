"""`natgrad curvature`: the matrices of a model over data, what is read from them, and pictures."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from natgrad.cli import (
    checkpoints,
    datasets,
    matrix_words,
    measure_tables,
    options,
    terminal,
)
from natgrad.cli.findings import Findings, WantedFindings
from natgrad.errors import SettingError
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.lab.report import canvas
from natgrad.operators import Problem
from natgrad.tables import Table


def _option(metavar: str, help: str, least: float | None = None) -> Any:
    """On one line: its default is in the words."""
    return typer.Option(metavar=metavar, help=help, min=least, show_default=False)


def curvature(
    network: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="small-cnn, resnet20, mlp, …, or module:function."),
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="digits, random, a .npz or .pt file, or module:function."
        ),
    ],
    checkpoint: Annotated[
        Path | None, _option("FILE", "Weights: a state_dict, or one as 'model'.")
    ] = None,
    loss: Annotated[
        str, _option("NAME", "cross-entropy (default), square, binary, or module:function.")
    ] = "cross-entropy",
    matrix: Annotated[
        str, _option("NAMES", "hessian,ggn,empirical (default); also fisher and mc.")
    ] = "hessian,ggn,empirical",
    structure: Annotated[
        str,
        _option(
            "NAMES",
            "full (default), block, kronecker, kronecker-reduce, ekfac, unitwise, diagonal.",
        ),
    ] = "full",
    parameters: Annotated[
        str | None, _option("PATTERNS", "Of names, such as 'fc.*,head.*'; all by default.")
    ] = None,
    samples: Annotated[
        int | None, _option("N", "Of the data, at random; all by default.", 1)
    ] = None,
    batch_size: Annotated[int | None, _option("N", "Samples at a time; all by default.", 1)] = None,
    sample: Annotated[str | None, _option("SHAPE", "Of a random input, such as 3,32,32.")] = None,
    draws: Annotated[int, _option("N", "Targets a sample, of mc; 1 by default.", 1)] = 1,
    damping: Annotated[float, _option("NUMBER", "Where matrices are inverted; 1e-3.", 0.0)] = 1e-3,
    eigenvalues: Annotated[int, _option("N", "The largest ones; 10 by default.", 1)] = 10,
    measures: Annotated[str, _option("NAMES", f"all, or {', '.join(measure_tables.NAMES)}.")] = "",
    quality: Annotated[
        bool, typer.Option("--quality", help="Compare structures, at two accuracies.")
    ] = False,
    target_accuracy: Annotated[
        float, _option("NUMBER", "Trained to for the second of them; 0.9.", 0.0)
    ] = 0.9,
    plots: Annotated[Path | None, _option("FOLDER", "Draw spectra, blocks and layers.")] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers.")
    ] = None,
    double: Annotated[bool, typer.Option("--double", help="Compute in float64.")] = False,
    seed: Annotated[int, _option("N", "Of weights, data and estimates; 0.", 0)] = 0,
) -> None:
    """Print sizes, traces, eigenvalues and measures of the curvature matrices of a model.

    natgrad curvature small-cnn digits --matrix hessian,ggn --plots pictures
    """
    wanted = WantedFindings(
        matrix_words.matrices(matrix),
        matrix_words.structures(structure),
        measure_tables.chosen(measures),
        eigenvalues,
        damping,
        draws,
        seed,
    )
    _check_files(plots, file)
    found = options.network(network)
    model = build(found, checkpoint, double=double, seed=seed)
    like = next(model.parameters(), torch.empty(0))
    shape = None if sample is None else options.shape(sample)
    criterion = matrix_words.loss(loss)
    read = datasets.WantedData(samples, batch_size, seed, shape, like.dtype, like.device)
    batches = datasets.find(data, found, model, criterion, read)
    with terminal.status("Looking at the model and the data"):
        some = None if parameters is None else [one.strip() for one in parameters.split(",")]
        problem = Problem(model, criterion, batches, parameters=some, progress=False)
    findings = Findings(problem, wanted, f"{network} on {data}")
    if quality:
        findings.check_quality(target_accuracy)
    for table in findings.tables():
        _say(table)
    if plots is not None:
        findings.draw(plots)
    if quality:
        for table in findings.compare(target_accuracy, plots):
            _say(table)
    if plots is not None:
        typer.echo(f"The pictures are in {plots}: {', '.join(findings.drawn)}.")
    if file is not None:
        file.write_text(json.dumps(findings.numbers, indent=1), encoding="utf-8")
        typer.echo(f"All numbers are in {file}.")


def build(found: NamedNetwork, checkpoint: Path | None, *, double: bool, seed: int) -> nn.Module:
    """The model in evaluation mode, with its own weights or those of the checkpoint."""
    torch.manual_seed(seed)
    model = found().double() if double else found()
    if checkpoint is not None:
        checkpoints.load_into(model, checkpoint)
    return model.eval()


def _say(table: Table) -> None:
    typer.echo(f"{str(table).rstrip()}\n")


def _check_files(plots: Path | None, file: Path | None) -> None:
    """Before anything is computed."""
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"--plots {plots} cannot be made a folder ({error.strerror}): name another one."
            ) from error
        canvas.available()
    if file is not None and not file.absolute().parent.is_dir():
        raise SettingError(
            f"--json is {file} but there is no folder {file.parent}: make it, or name a file "
            "elsewhere."
        )
