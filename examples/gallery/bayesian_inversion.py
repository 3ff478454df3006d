#!/usr/bin/env python
"""Find a field from indirect observations, and how uncertain it is: a Bayesian inverse problem with NumPy alone.

    mpiexec -n 4 python examples/gallery/bayesian_inversion.py

Water is pumped from one well after another, and all wells observe how far the head falls (hydraulic tomography). What
is sought is the logarithm of the conductivity in each cell of a grid; before, it is a Gaussian random field. Gauss and
Newton's method finds the most probable field. There the posterior is approximated by a Gaussian, with a covariance that
needs only the few directions which the data know better than the prior: the leading eigenvectors of the misfit's
Hessian, by a randomized method (Halko, Martinsson & Tropp 2011) that takes products with blocks of vectors. Each rank
computes some of the experiments. The bits depend on no number of ranks: compare the sha256. The same Gaussian is then
computed in one process, by dense algebra and differences of the forward model, and how far apart both are is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from drawing import BLUE, add_option, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for BLAS: each rank computes with one thread

import numpy as np  # noqa: E402

import mpizero as mz  # noqa: E402

Array = np.ndarray[Any, Any]
#: Cells and wells along each axis, directions of the posterior; without and with --small.
LARGE, SMALL = (16, 4, 60), (8, 2, 10)


class Aquifer:
    """Compute heads at wells in a square of cells whose edge has head 0, by finite volumes.

    The flow through a face between two cells is the geometric mean of their conductivities by the difference of their
    heads. ``field`` is the logarithm of the conductivity. ``field = factor @ whitened``, where the elements of
    ``whitened`` are independent and standard normal in the prior.
    """

    def __init__(self, cells: int, wells: int, deviation: float = 1.0, length: float = 0.3) -> None:
        step = np.eye(cells + 1, cells) - np.eye(cells + 1, cells, -1)
        along = abs(step) / abs(step).sum(1, keepdims=True)
        one = np.eye(cells)
        self.difference = np.vstack([np.kron(step, one), np.kron(one, step)])  # of neighbouring heads, at each face
        self.mean = np.vstack([np.kron(along, one), np.kron(one, along)])
        self.shorter = 3 - abs(self.difference).sum(1)  # the edge is half a cell away
        lines = np.linspace(0, cells, 2 * wells + 1).astype(int)[1::2]
        self.wells = (cells * lines[:, None] + lines).ravel()
        places = (np.indices((cells, cells)).reshape(2, -1).T + 0.5) / cells
        apart = np.sqrt(((places[:, None] - places) ** 2).sum(-1))
        self.prior = deviation**2 * np.exp(-apart / length)
        self.factor = np.linalg.cholesky(self.prior)
        self._solved = lru_cache(maxsize=2)(self._solve)

    def _solve(self, field: bytes) -> tuple[Array, Array]:
        conductance = self.shorter * np.exp(self.mean @ np.frombuffer(field))
        matrix = self.difference.T @ (conductance[:, None] * self.difference)
        pumped = np.zeros((len(matrix), len(self.wells)))
        pumped[self.wells, range(len(self.wells))] = 1
        return conductance, np.linalg.solve(matrix, pumped)

    def solve(self, field: Array) -> tuple[Array, Array]:
        """Return the conductance of each face, and all heads for one unit pumped from each well, as columns.

        All experiments have the same field, so a rank keeps them.
        """
        return self._solved(field.tobytes())

    def heads(self, field: Array, rates: Array) -> Array:
        """Return the heads at the wells (experiments x wells) for the rates pumped from them."""
        return rates @ self.solve(field)[1][self.wells]


@dataclass(frozen=True)
class Misfit:
    """Compare computed with observed heads: half the squared residuals in units of the noise.

    Each experiment is a sample: ``x`` are the rates of its wells, ``y`` the observed heads.
    """

    aquifer: Aquifer
    noise: float

    def loss_and_grad(self, parameters: Mapping[str, Array], batch: Any) -> tuple[float, dict[str, Array], float]:
        """Return the misfit of some experiments, its gradient by the whitened field, and their number."""
        rates, observed = batch
        aquifer, field = self.aquifer, self.aquifer.factor @ parameters["whitened"]
        conductance, responses = aquifer.solve(field)
        residual = (aquifer.heads(field, rates) - observed) / self.noise
        forward = aquifer.difference @ (responses @ rates.T)
        adjoint = aquifer.difference @ (responses @ residual.T) / self.noise  # the operator is symmetric
        by_field = -aquifer.mean.T @ (conductance * (forward * adjoint).sum(1))
        return 0.5 * float((residual**2).sum()), {"whitened": aquifer.factor.T @ by_field}, float(len(rates))

    def products(self, whitened: Array, rates: Array, directions: Array) -> Array:
        """Return the products of Gauss and Newton's Hessian with directions, which are columns.

        One tangent and one adjoint solution for each direction and experiment.
        """
        aquifer = self.aquifer
        conductance, responses = aquifer.solve(aquifer.factor @ whitened)
        gradients = aquifer.difference @ responses
        changes = conductance[:, None] * (aquifer.mean @ (aquifer.factor @ directions))
        found = np.zeros_like(changes)
        for forward in (gradients @ rates.T).T:
            heads = -gradients.T @ (changes * forward[:, None])
            found -= (conductance * forward)[:, None] * (gradients @ heads)
        return aquifer.factor.T @ (aquifer.mean.T @ found) / self.noise**2

    def product(
        self, parameters: Mapping[str, Array], batch: Any, direction: Mapping[str, Array]
    ) -> tuple[dict[str, Array], float]:
        """Return the product with one direction, as ``FunctionModel(product=...)`` wants it."""
        found = self.products(parameters["whitened"], batch[0], direction["whitened"][:, None])
        return {"whitened": found[:, 0]}, float(len(batch[0]))

    def quadratic_form(
        self, whitened: Array, parameters: Mapping[str, Array], batch: Any
    ) -> tuple[float, dict[str, Array], float]:
        """Return ``tr(B^T H B) / 2`` for a block B of directions, whose gradient is the product ``H B``."""
        found = self.products(whitened, batch[0], parameters["block"])
        return 0.5 * float((parameters["block"] * found).sum()), {"block": found}, float(len(batch[0]))


def eigenpairs(multiply: Callable[[Array], Array], size: int, rank: int, rng: np.random.Generator) -> Any:
    """Return the largest eigenvalues of a symmetric matrix and their vectors, from products with blocks of vectors."""
    basis = rng.normal(size=(size, rank + 5))
    for _ in range(2):
        basis, _ = np.linalg.qr(multiply(basis))
    values, vectors = np.linalg.eigh(basis.T @ multiply(basis))
    return values[: -rank - 1 : -1], basis @ vectors[:, : -rank - 1 : -1]


def posterior_variances(aquifer: Aquifer, values: Array, vectors: Array) -> Array:
    """Return the variance of the field in each cell from eigenpairs of the misfit's Hessian by the whitened field."""
    known = aquifer.factor @ vectors
    return np.diag(aquifer.prior) - known**2 @ (values / (1 + values))


def dense_posterior(misfit: Misfit, field: Array, rates: Array, observed: Array) -> tuple[Array, Array]:
    """Return the most probable field of the model linearized at a field, and the variances, by dense algebra.

    Nothing but heads and the prior is used: the Jacobian consists of differences, without tangents and adjoints.
    """
    prior, computed = misfit.aquifer.prior, misfit.aquifer.heads(field, rates).ravel()
    columns = []
    for change in 1e-5 * np.eye(len(field)):
        more, less = (misfit.aquifer.heads(field + sign * change, rates) for sign in (1, -1))
        columns.append((more - less).ravel() / 2e-5)
    jacobian = np.stack(columns, axis=1)
    crossed = prior @ jacobian.T
    gain = np.linalg.solve(jacobian @ crossed + misfit.noise**2 * np.eye(len(jacobian)), crossed.T).T
    return gain @ (observed.ravel() - computed + jacobian @ field), np.diag(prior) - (gain * crossed).sum(1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small grid, in a second")
    parser.add_argument(
        "--rank", type=int, help=f"directions of the posterior (default: {LARGE[2]}; {SMALL[2]} with --small)"
    )
    add_option(parser, "the field, what was found of it, and how uncertain that is")
    options = parser.parse_args(arguments)
    cells, _, rank = SMALL if options.small else LARGE
    options.rank = rank if options.rank is None else options.rank
    if not 0 < options.rank <= cells**2 - 5:
        parser.error(f"--rank {options.rank}: expected 1 to {cells**2 - 5} directions for {cells} x {cells} cells")
    return options


def draw(figure: Any, aquifer: Aquifer, fields: tuple[Array, Array, Array]) -> None:
    """Draw the true field, the found one, its deviation, and all of them along a row of wells."""
    cells = round(len(fields[0]) ** 0.5)
    truth, found, deviation = (field.reshape(cells, cells) for field in fields)
    rows, columns = ((line + 0.5) / cells for line in divmod(aquifer.wells, cells))
    limits = {"vmin": min(truth.min(), found.min()), "vmax": max(truth.max(), found.max())}
    ((true, best), (uncertain, along)) = figure.subplots(2, 2)
    for axes, values, title, colours in (
        (true, truth, "true field", limits),
        (best, found, "most probable field", limits),
        (uncertain, deviation, "its standard deviation", {"cmap": "cividis", "vmin": 0}),
    ):
        image = axes.imshow(values, extent=(0, 1, 1, 0), **colours)
        axes.plot(columns, rows, "o", color="white", markeredgecolor="black", markersize=4)
        axes.set(title=title, xlabel="x (edge = 1)", ylabel="y (edge = 1)", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        figure.colorbar(image, ax=axes, label="ln(conductivity)")
    row, x = aquifer.wells[len(aquifer.wells) // 2] // cells, (np.arange(cells) + 0.5) / cells
    margin = 1.96 * deviation[row]
    along.fill_between(x, found[row] - margin, found[row] + margin, color=BLUE, alpha=0.3, label="95 %")
    along.plot(x, found[row], color=BLUE, label="found")
    along.plot(x, truth[row], "k--", label="true")
    along.set(title=f"at y = {(row + 0.5) / cells:.2f}", xlabel="x (edge = 1)", ylabel="ln(conductivity)", xlim=(0, 1))
    along.legend(fontsize=8)


@dataclass(frozen=True)
class Found:
    """Hold what is compared: hashes of the field and of its variances, and differences to dense algebra."""

    sha256: str
    of_variances: str
    field_error: float
    variance_error: float


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Solve the problem, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    cells, wells, _ = SMALL if options.small else LARGE
    rank, rng = options.rank, np.random.default_rng(0)
    aquifer = Aquifer(cells, wells)
    truth = aquifer.factor @ rng.normal(size=cells**2)
    rates = np.eye(wells**2)
    exact = aquifer.heads(truth, rates)
    misfit = Misfit(aquifer, noise=0.05 * float(exact.std()))
    observed = exact + rng.normal(0, misfit.noise, exact.shape)

    config = mz.Config(micro_batch=1)
    with mz.Mesh(comm) as mesh:
        start = {"whitened": np.zeros(cells**2)}
        function = mz.FunctionModel(start, misfit.loss_and_grad, product=misfit.product)
        with mz.distribute(function, None, "zero1", mesh=mesh, config=config) as model:
            fit = mz.minimize(
                model,
                (rates, observed),
                method="gauss-newton",
                regularization={"whitened": mz.Tikhonov(1 / len(rates))},  # the loss is a mean over experiments
                options={"gtol": 1e-8, "radius": 10.0},
            )
            whitened, digest, ranks = fit.x, model.parameters_sha256(), model.world_size
            mine = slice(*(len(rates) * r // ranks for r in (model.rank, model.rank + 1)))
            speaks = model.rank == 0
        form = partial(misfit.quadratic_form, whitened)
        products = mz.FunctionModel({"block": np.zeros((cells**2, rank + 5))}, form)
        with mz.distribute(products, None, "zero1", mesh=mesh, config=config) as model:

            def multiply(block: Array) -> Array:
                model.set_parameters(block.ravel())
                mean = model.compute_gradients(rates[mine], observed[mine], gather=True).values
                return len(rates) * mean.reshape(block.shape)

            values, vectors = eigenpairs(multiply, cells**2, rank, rng)
    field, variances = aquifer.factor @ whitened, posterior_variances(aquifer, values, vectors)
    seconds = time.monotonic() - began
    dense_field, dense_variances = dense_posterior(misfit, field, rates, observed)
    found = Found(
        digest,
        hashlib.sha256(variances.tobytes()).hexdigest(),
        float(abs(field - dense_field).max() / abs(dense_field).max()),
        float((abs(variances - dense_variances) / dense_variances).max()),
    )
    if speaks:
        inside = (abs(field - truth) < 1.96 * np.sqrt(variances)).mean()
        print(f"{fit.message}: {fit.nit} iterations, {fit.nfev} evaluations and products, {seconds:.1f} s")
        print(f"error of the field {np.sqrt(((field - truth) ** 2).mean()):.3f}, prior {truth.std():.3f}", end="; ")
        print(f"mean posterior deviation {np.sqrt(variances.mean()):.3f}; {inside:.1%} of cells within 95% intervals")
        print(f"eigenvalues {values[0]:.3g} to {values[-1]:.3g} of {rank} directions")
        print(f"relative differences to dense algebra: field {found.field_error:.1e}", end=", ")
        print(f"variances {found.variance_error:.1e}; their sha256 {found.of_variances[:16]}...")
        print(f"sha256 {digest} on {ranks} ranks")
        if options.picture:
            save(options.picture, (6, 4.8), partial(draw, aquifer=aquifer, fields=(truth, field, np.sqrt(variances))))
    return found


if __name__ == "__main__":
    main()
