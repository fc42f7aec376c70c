"""The libraries that compute curvature, each with the same few methods, from the model on.

What a library does not offer is missing from its class. Whatever an object could keep for the next
call is made anew in every call, as the time is that of a first result.
"""

import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import natgrad
from benchmarks import plain

TOP = 10  # eigenvalues
ESTIMATE = 100  # products for what a library can only estimate


@dataclass(frozen=True)
class Operands:
    """A network, one batch of inputs `[n, …]`, classes `[n]`, and vectors `[P, k]` to multiply."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    columns: int = 100

    @cached_property
    def vectors(self) -> Tensor:
        size = sum(p.numel() for p in self.build().parameters())
        return torch.randn(size, self.columns, generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        """A new one, with the same weights at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build()


class Contender:
    """`package` as pip knows it; None for what is always there. No library checks its arguments
    (that a model is deterministic, for example), which takes as long as some of the tasks."""

    name = ""
    package: str | None = None

    def __init__(self, operands: Operands) -> None:
        self.model = operands.model()
        self.loss = nn.CrossEntropyLoss()
        self.x, self.y, self.v = operands.inputs, operands.targets, operands.vectors
        self.data = [(self.x, self.y)]

    @classmethod
    def installed(cls) -> str | None:
        """The version, "" for what has no package, or None when it is not installed."""
        if cls.package is None:
            return ""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None


class Natgrad(Contender):
    name = "natgrad"

    def ggn(self, **options: Any) -> Any:
        return natgrad.ggn(self.model, self.loss, self.data, check=False, **options)

    def fisher(self) -> Tensor:
        return natgrad.fisher(self.model, self.loss, self.data, check=False).dense()

    def diagonal(self) -> Tensor:
        return self.ggn().diagonal()

    def trace(self) -> float:
        return float(self.ggn().trace())

    def kfac(self) -> Any:
        return self.ggn(structure=natgrad.Kronecker())

    def kfac_product(self, kfac: Any, v: Tensor) -> Tensor:
        return kfac @ v

    def products(self) -> Tensor:
        G = self.ggn()
        return torch.stack([G @ column for column in self.v.T.contiguous()], 1)

    def product(self) -> Tensor:
        return self.ggn() @ self.v

    def top_eigenvalues(self) -> Tensor:
        H = natgrad.hessian(self.model, self.loss, self.data, check=False)
        return H.eigenvalues(TOP).values

    def gram_eigenvalues(self) -> Tensor:
        return self.ggn().exact_eigenvalues()


class Plain(Contender):
    """`benchmarks/plain.py`."""

    name = "plain"

    def fisher(self) -> Tensor:
        return plain.fisher(self.model, self.x)

    def diagonal(self) -> Tensor:
        return plain.diagonal(self.model, self.x)

    def trace(self) -> float:
        return plain.trace(self.model, self.x)

    def kfac(self) -> plain.Factors:
        return plain.kfac(self.model, self.x)

    def kfac_product(self, kfac: plain.Factors, v: Tensor) -> Tensor:
        return plain.kfac_product(self.model, kfac, v)

    def products(self) -> Tensor:
        return plain.products(self.model, self.x, self.v)

    def product(self) -> Tensor:
        return plain.product(self.model, self.x, self.v)

    def top_eigenvalues(self) -> Tensor:
        return plain.top_eigenvalues(self.model, self.x, self.y, TOP, steps=60)

    def gram_eigenvalues(self) -> Tensor:
        return plain.gram_eigenvalues(self.model, self.x)


class Curvlinops(Contender):
    """Diagonal and trace are estimates there (XDiag, XTrace)."""

    name = "curvlinops"
    package = "curvlinops-for-pytorch"

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, in linear_cg
            import curvlinops
        self.curvlinops = curvlinops

    def operator(self, kind: str, **options: Any) -> Any:
        parameters = list(self.model.parameters())
        make = getattr(self.curvlinops, kind)
        return make(
            self.model, self.loss, parameters, self.data, check_deterministic=False, **options
        )

    def fisher(self) -> Tensor:
        G = self.operator("GGNLinearOperator")
        eye = torch.eye(len(self.v))
        # The whole identity at once would need the activations of P batches.
        return torch.cat([G @ part.contiguous() for part in eye.split(ESTIMATE, 1)], 1)

    def diagonal(self) -> Tensor:
        return self.curvlinops.xdiag(self.operator("GGNLinearOperator"), _matvecs(len(self.v)))

    def trace(self) -> float:
        products = _matvecs(len(self.v))
        return float(self.curvlinops.xtrace(self.operator("GGNLinearOperator"), products))

    def kfac(self) -> Any:
        kfac = self.operator(
            "KFACLinearOperator", fisher_type="type-2", separate_weight_and_bias=False
        )
        kfac.compute_kronecker_factors()
        return kfac

    def kfac_product(self, kfac: Any, v: Tensor) -> Tensor:
        return kfac @ v

    def products(self) -> Tensor:
        G = self.operator("GGNLinearOperator")
        return torch.stack([G @ column for column in self.v.T.contiguous()], 1)

    def product(self) -> Tensor:
        return self.operator("GGNLinearOperator") @ self.v

    def top_eigenvalues(self) -> Tensor:
        from scipy.sparse.linalg import eigsh

        H = self.operator("HessianLinearOperator").to_scipy()
        values = eigsh(H, k=TOP, which="LA", return_eigenvectors=False, tol=1e-4)
        return torch.from_numpy(values).sort(descending=True).values


def _matvecs(size: int) -> int:
    """An even number of products, less than the number of rows."""
    return min(ESTIMATE, (size - 1) // 2 * 2)


class Backpack(Contender):
    """Kronecker factors keep weights and biases apart there."""

    name = "BackPACK"
    package = "backpack-for-pytorch"
    apart = True

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        import backpack
        from backpack import extensions
        from backpack.hessianfree.ggnvp import ggn_vector_product

        self.backpack, self.extensions = backpack, extensions
        self.multiply = ggn_vector_product
        self.extended = backpack.extend(operands.model())
        self.extended_loss = backpack.extend(nn.CrossEntropyLoss())

    def backward(self, extension: Any) -> list[Any]:
        """What the extension left at each parameter."""
        for p in self.extended.parameters():
            p.grad = None
        with warnings.catch_warnings(), self.backpack.backpack(extension):
            warnings.simplefilter("ignore", UserWarning)  # of full backward hooks
            self.extended_loss(self.extended(self.x), self.y).backward()
        return [p.__dict__.pop(extension.savefield) for p in self.extended.parameters()]

    def roots(self) -> list[Tensor]:
        """`[C, n, *shape]` of each parameter; products of rows sum to `G`."""
        return self.backward(self.extensions.SqrtGGNExact())

    def fisher(self) -> Tensor:
        rows = torch.cat([r.flatten(2) for r in self.roots()], 2).flatten(0, 1)
        return rows.T @ rows

    def diagonal(self) -> Tensor:
        return plain.flatten(self.backward(self.extensions.DiagGGNExact()))

    def trace(self) -> float:
        return float(self.diagonal().sum())

    def kfac(self) -> list[list[Tensor]]:
        return self.backward(self.extensions.KFLR())

    def kfac_product(self, kfac: list[list[Tensor]], v: Tensor) -> Tensor:
        parts = []
        for factors, part in zip(kfac, v.split(self.sizes), strict=True):
            B, A = factors if len(factors) == 2 else (factors[0], torch.ones(1, 1))
            w = part.view(len(B), len(A), -1)
            parts.append(torch.einsum("po,oik,ij->pjk", B, w, A).flatten(0, 1))
        return torch.cat(parts)

    @property
    def sizes(self) -> list[int]:
        return [p.numel() for p in self.model.parameters()]

    def products(self) -> Tensor:
        parameters = list(self.model.parameters())
        out = self.model(self.x)
        loss, found = self.loss(out, self.y), []
        for column in self.v.T:
            parts = zip(column.split(self.sizes), parameters, strict=True)
            v = [part.view_as(p) for part, p in parts]
            found.append(plain.flatten(self.multiply(loss, out, self.model, v)))
        return torch.stack(found, 1)

    def gram_eigenvalues(self) -> Tensor:
        rows = [r.flatten(2).flatten(0, 1) for r in self.roots()]
        return torch.linalg.eigvalsh(sum(r @ r.T for r in rows))


class NNGeometry(Contender):
    name = "NNGeometry"
    package = "nngeometry"

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        from nngeometry import metrics, object

        self.metrics, self.spaces = metrics, object

    def matrix(self, kind: str) -> Any:
        batch = (self.x.detach().clone(), self.y)  # it wants gradients of the inputs, too
        kind = getattr(self.spaces, kind)
        return self.metrics.FIM(self.model, batch, kind, variant="classif_logits")

    def multiply(self, matrix: Any, v: Tensor) -> Tensor:
        layers = matrix.generator.layer_collection
        columns = [self.spaces.PVector(layers, vector_repr=c) for c in v.T.contiguous()]
        return torch.stack([matrix.mv(column).to_torch().detach() for column in columns], 1)

    def fisher(self) -> Tensor:
        return self.matrix("PMatDense").to_torch()

    def diagonal(self) -> Tensor:
        return self.matrix("PMatDiag").get_diag()

    def trace(self) -> float:
        return float(self.matrix("PMatImplicit").trace())

    def kfac(self) -> Any:
        return self.matrix("PMatKFAC")

    def kfac_product(self, kfac: Any, v: Tensor) -> Tensor:
        return self.multiply(kfac, v)

    def products(self) -> Tensor:
        return self.multiply(self.matrix("PMatImplicit"), self.v)

    def gram_eigenvalues(self) -> Tensor:
        generator = self.matrix("PMatImplicit").generator
        batch = (self.x.detach().clone(), self.y)
        gram = self.spaces.FMatDense(generator=generator, examples=batch)
        gram.compute_eigendecomposition()
        return gram.evals / len(self.x)


CONTENDERS = (Natgrad, Plain, Curvlinops, Backpack, NNGeometry)
