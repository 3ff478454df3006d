#!/usr/bin/env python
"""Learn the solution operator of Darcy flow by a Fourier neural operator, on grids that may be cut over ranks.

    mpiexec -n 4 python examples/gallery/darcy_flow.py --domain 2 2

A sample is the permeability a of the ground, 12 or 3 where a Gaussian random field is positive or negative, with the
pressure u of -div(a grad u) = 1, which is 0 at the edges of the unit square. This file solves the equation by finite
volumes and conjugate gradients, all samples together. The operator maps a to u (Li et al. 2021, section 5.2). It is
trained by the relative error of whole fields, whose norms ranks add up over their boxes, and the bits of the parameters
depend on no number of ranks and no cut. The printed errors are mean relative ones of samples that training has not
seen: on the grid of the training, of the same ground on a grid twice as fine, and those of the mean solution.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from drawing import BLUE, GREEN, add_option, save

import mpizero as mz

Array = np.ndarray[Any, Any]
#: Points of an axis, samples of the training, its steps, and modes; without and with --small.
LARGE, SMALL = (32, 512, 1000, 12), (16, 32, 60, 8)
HIGH, LOW, WAVES, UNSEEN, BATCH = 12.0, 3.0, 16, 32, 16


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=int, nargs=2, default=(1, 1), metavar="N", help="parts of both axes")
    parser.add_argument("--small", action="store_true", help="a small grid, few samples and steps, in seconds")
    parser.add_argument("--steps", type=int, help=f"of the training (default: {LARGE[2]}; {SMALL[2]} with --small)")
    add_option(parser, "an unseen ground with its solution, the operator's and its error")
    options = parser.parse_args(arguments)
    options.points, options.samples, steps, options.modes = SMALL if options.small else LARGE
    options.steps = steps if options.steps is None else options.steps
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    return options


def permeability(size: Array, points: int) -> Array:
    """Return permeabilities (samples, points, points), from random numbers (samples, waves, waves).

    The field whose sign decides has the covariance (-laplacian + 9)**-2, and no slope across the edges.
    """
    waves = np.arange(size.shape[-1])
    cosines = np.cos(np.pi * np.outer(waves, (np.arange(points) + 0.5) / points))
    cosines[1:] *= np.sqrt(2)
    deviation = 1 / (np.pi**2 * (waves[:, None] ** 2 + waves**2) + 9)
    field = np.einsum("sij,ix,jy->sxy", size * deviation, cosines, cosines, optimize=True)
    return np.where(field >= 0, HIGH, LOW)


def neighbours(wide: Array) -> list[Array]:
    """Return the values of the cells before and after each cell along both axes; ``wide`` has one more at each end."""
    return [wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:]]


def solve(a: Array, tolerance: float = 1e-8) -> Array:
    """Return the pressures (samples, points, points) in the cells of a grid: conjugate gradients for all samples."""
    around = ((0, 0), (1, 1), (1, 1))
    # What flows from a cell to its neighbour: the harmonic mean of both, and twice as much to the edge, half as far.
    between = [2 * a * other / (a + other) for other in neighbours(np.pad(a, around, mode="edge"))]
    for (axis, end), one in zip(((1, 0), (1, -1), (2, 0), (2, -1)), between, strict=True):
        np.moveaxis(one, axis, 0)[end] *= 2

    def flows(u: Array) -> Array:
        pairs = zip(between, neighbours(np.pad(u, around)), strict=True)
        return sum(one * (u - other) for one, other in pairs)

    def product(one: Array, other: Array) -> Array:
        return np.einsum("sxy,sxy->s", one, other)[:, None, None]

    u = np.zeros_like(a)
    rest = direction = np.full_like(a, 1 / a.shape[-1] ** 2)
    square = first = product(rest, rest)
    while (square > tolerance**2 * first).any():
        flow = flows(direction)
        step = square / product(direction, flow)
        u, rest = u + step * direction, rest - step * flow
        square, before = product(rest, rest), square
        direction = rest + square / before * direction
    return u


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hash of the parameters, and mean relative errors of samples that were not seen."""

    sha256: str
    error: float
    on_fine_grid: float
    of_mean: float


def mean_error(found: Array, expected: Array) -> float:
    """Return the mean over samples of the relative error."""
    axes = tuple(range(1, expected.ndim))
    return float((np.sqrt(((found - expected) ** 2).sum(axes)) / np.sqrt((expected**2).sum(axes))).mean())


def draw(figure: Any, ground: Array, solution: Array, operator: Array, found: Found) -> None:
    """Draw an unseen ground with both solutions on the fine grid and their difference, and the errors."""
    panels = figure.subplots(1, 5, width_ratios=(1, 1, 1, 1, 1.2))
    shown = (("permeability", ground), ("solution", solution), ("operator", operator), ("error", operator - solution))
    images = []
    for axes, (title, field) in zip(panels, shown, strict=False):
        size = float(np.abs(field).max())
        low, high = {"permeability": (LOW, HIGH), "error": (-size, size)}.get(title, (0, float(solution.max())))
        colours = "RdBu_r" if title == "error" else "viridis"
        images.append(axes.imshow(field.T, origin="lower", cmap=colours, vmin=low, vmax=high))
        axes.set(title=title, xticks=(), yticks=())
    for number, places in ((0, panels[0]), (1, panels[1:3]), (3, panels[3])):
        ends = images[number].get_clim()
        figure.colorbar(images[number], ax=places, orientation="horizontal", shrink=0.7, ticks=ends, format="%.2g")
    names = ("mean of\nsolutions", "grid of the\ntraining", "finer grid")
    sizes = (found.of_mean, found.error, found.on_fine_grid)
    bars = panels[4].bar(names, sizes, color=("gray", BLUE, GREEN))
    panels[4].bar_label(bars, fmt="%.2g")
    panels[4].set(title="relative error", yticks=(), ylim=(0, 1.15 * max(sizes)))
    panels[4].tick_params(axis="x", labelsize=7)


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train the operator, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    size = np.random.default_rng(0).normal(size=(options.samples + UNSEEN, WAVES, WAVES))
    ground = permeability(size, options.points)
    pressure = solve(ground)
    fine = permeability(size[:UNSEEN], 2 * options.points)
    fine_pressure = solve(fine)
    scale = pressure[UNSEEN:].std()

    def as_fields(a: Array) -> Array:
        return ((2 * a - HIGH - LOW) / (HIGH - LOW))[..., None].astype(np.float32)

    x, y = as_fields(ground), (pressure / scale)[..., None].astype(np.float32)
    prepared = time.monotonic() - began
    net = mz.nn.FNO(
        inputs=1, outputs=1, axes=2, modes=options.modes, width=24, padding=0.25, loss="relative_l2", space=x.shape[1:3]
    )
    adam, config = mz.Adam(lr=mz.optim.cosine(5e-3, options.steps)), mz.Config(micro_batch=BATCH // 4)
    with (
        mz.Mesh(comm, domain=tuple(options.domain)) as mesh,
        mz.distribute(net, adam, "zero2", mesh=mesh, config=config) as model,
    ):
        source = mz.data.ArraySource(x[UNSEEN:], y[UNSEEN:])
        for batch in mz.data.batches(source, model, global_batch=BATCH, seed=0, steps=options.steps):
            loss = model.train(*batch)  # this rank's part of every sample
        trained, predicted = time.monotonic() - began - prepared, []
        for fields in (x[:UNSEEN], as_fields(fine)):  # parameters know no grid
            here = mesh.slab(fields.shape[1:3])
            whole = np.empty(fields.shape[:3])
            for place, part in mesh.communicator.allgather_object((here, model.predict(fields[:, *here]))):
                whole[:, *place] = scale * part[..., 0]
            predicted.append(whole)
        found = Found(
            model.parameters_sha256(),
            mean_error(predicted[0], pressure[:UNSEEN]),
            mean_error(predicted[1], fine_pressure),
            mean_error(pressure[UNSEEN:].mean(axis=0), pressure[:UNSEEN]),
        )
        if model.rank == 0:
            cut = " x ".join(map(str, options.domain))
            grid, finer = (f"{n} x {n}" for n in (options.points, 2 * options.points))
            print(f"grid of {grid} cut {cut}; {len(x)} samples solved in {prepared:.1f} s", end=", ")
            print(f"{options.steps} steps in {trained:.1f} s, last loss {loss:.3e}")
            print(f"relative error of {UNSEEN} unseen samples: {found.error:.2e} on {grid}", end=", ")
            print(f"{found.on_fine_grid:.2e} on {finer}; of the mean solution {found.of_mean:.2e}")
            print(f"{time.monotonic() - began:.1f} s; sha256 {found.sha256} on {model.world_size} ranks")
            if options.picture:
                fields = {"ground": fine[0], "solution": fine_pressure[0], "operator": predicted[1][0]}
                save(options.picture, (10, 2.6), partial(draw, found=found, **fields))
    return found


if __name__ == "__main__":
    main()
