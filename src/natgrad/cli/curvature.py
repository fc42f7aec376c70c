"""`natgrad curvature`: the matrices of a model over data, what is read from them, and pictures."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from natgrad.cli import checkpoints, datasets, matrices, measured, networks, options, progress
from natgrad.cli.matrices import MatrixName, StructureName
from natgrad.cli.training import accuracy, train
from natgrad.curvature.losses import Loss
from natgrad.errors import NatgradError, SettingError
from natgrad.operators import Lanczos, Operator, Problem, block_norms
from natgrad.report import canvas, curvature as pictures
from natgrad.report import matrices as read
from natgrad.report import quality as approximations
from natgrad.report.sizes import Sizes, layers_table, sizes
from natgrad.report.written import SMALL, written

_SAMPLED = 64  # products a layer, from which norms of large blocks are estimated


def curvature(
    network: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="small-cnn, resnet20, mlp, …; or module:function."),
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="digits; random; a .npz or .pt file with inputs and targets; or module:function.",
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights: a state_dict, or one as 'model'.")
    ] = None,
    loss: Annotated[
        str, typer.Option(metavar="NAME", help="cross-entropy, square, binary; module:function.")
    ] = "cross-entropy",
    matrix: Annotated[
        list[str], typer.Option(metavar="NAMES", help="hessian, ggn, fisher, mc, empirical.")
    ] = ["hessian,ggn,empirical"],  # noqa: B006 (typer copies it)
    structure: Annotated[
        list[str],
        typer.Option(
            metavar="NAMES",
            help="full, block, kronecker, kronecker-reduce, ekfac, unitwise, diagonal.",
        ),
    ] = ["full"],  # noqa: B006
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of the data, at random; all by default.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at a time.")] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Of one random input, such as 3,32,32.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Targets a sample of mc.")] = 1,
    damping: Annotated[float, typer.Option(min=0.0, help="Of conditions, TIC and solves.")] = 1e-3,
    eigenvalues: Annotated[int, typer.Option(min=1, help="How many of the largest.")] = 10,
    measures: Annotated[
        list[str], typer.Option(metavar="NAMES", help=f"{', '.join(measured.NAMES)}; all.")
    ] = [],  # noqa: B006
    quality: Annotated[
        bool, typer.Option("--quality", help="How good approximations are, twice.")
    ] = False,
    target_accuracy: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="To train to for the second time.")
    ] = 0.9,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw everything.")] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers.")
    ] = None,
    double: Annotated[bool, typer.Option("--double", help="Compute in float64.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and estimates.")] = 0,
) -> None:
    """Print sizes, traces, eigenvalues and measures of the curvature matrices of a model.

    natgrad curvature small-cnn digits --matrix hessian,ggn --measures all --plots pictures
    """
    try:
        wanted = Wanted(
            matrices.words(matrix, MatrixName, "--matrix"),
            matrices.words(structure, StructureName, "--structure"),
            measured.names(measures),
            eigenvalues,
            damping,
            draws,
            seed,
        )
        _check_files(plots, file)
        criterion = matrices.loss(loss)
        shape = None if sample is None else options.shape(sample)
        problem = _problem(network, data, checkpoint, criterion, double, samples, batch_size, shape, seed)
        report = Report(problem, wanted, f"{network} on {data}")
        if quality:
            report.check_quality(target_accuracy)
        report.run()
        if plots is not None:
            report.draw(plots)
        if quality:
            report.quality(target_accuracy, plots)
        if file is not None:
            file.write_text(json.dumps(report.numbers, indent=1), encoding="utf-8")
            typer.echo(f"\nAll numbers are in {file}.")
    except NatgradError as error:
        typer.echo(f"natgrad: {error}", err=True)
        raise typer.Exit(2) from None
