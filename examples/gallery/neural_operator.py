#!/usr/bin/env python
"""Learn the solution operator of Burgers' equation by a Fourier neural operator with PyTorch.

    mpiexec -n 4 python examples/gallery/neural_operator.py

A sample is a periodic start u(0, x), a Gaussian random field, with the solution u(1, x) of u_t + u u_x = 0.1 u_xx,
which a pseudo-spectral solver in this file computes. The network maps one to the other (Li et al. 2021): its layers
multiply the lowest Fourier modes by matrices and add a linear map of the values at each point, so it can be applied on
other grids. Each rank trains on some of the samples, and the bits of the parameters depend on no number of ranks. The
printed errors are relative ones, of starts that training has not seen: on the grid of the training, on a finer one, and
those of two plain predictions, the start itself and the linear operator that fits the training samples best. Needs
PyTorch (pip install torch).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drawing import BLUE, GREEN, ORANGE, add_option, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for PyTorch: each rank computes with one thread

import numpy as np  # noqa: E402

import mpizero as mz  # noqa: E402

Array = np.ndarray[Any, Any]
#: Samples of the training, and its steps; without and with --small.
LARGE, SMALL = (512, 600), (64, 40)
VISCOSITY, POINTS, FINE, UNSEEN, BATCH = 0.1, 64, 256, 64, 32


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few samples and steps, in seconds")
    parser.add_argument("--steps", type=int, help=f"(default: {LARGE[1]}; {SMALL[1]} with --small)")
    add_option(parser, "unseen starts with their solutions, and the errors")
    options = parser.parse_args(arguments)
    options.samples, steps = SMALL if options.small else LARGE
    options.steps = steps if options.steps is None else options.steps
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    return options


try:
    import torch
    from torch import nn

    from mpizero.adapters.torch import TorchModel
except ModuleNotFoundError:
    parse()  # --help works without it
    sys.exit("this example needs PyTorch, which is missing: pip install torch")


class Layer(nn.Module):
    """Add a product in the lowest Fourier modes, and a linear map at each point, to values (samples, points, width)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.local = modes, nn.Linear(width, width)
        self.spectral = nn.Parameter(torch.randn(modes, width, width, 2) / width)

    def forward(self, values: Any) -> Any:
        """Return the values of the next layer."""
        points = values.shape[1]
        coefficients = torch.fft.rfft(values, dim=1, norm="forward")[:, : self.modes]
        product = torch.einsum("smi,mio->smo", coefficients, torch.view_as_complex(self.spectral))
        smooth = torch.fft.irfft(product, n=points, dim=1, norm="forward")
        return values + nn.functional.gelu(smooth + self.local(values))


class Operator(nn.Module):
    """Map starts (samples, points) to solutions, on a grid of any number of points."""

    def __init__(self, width: int = 24, modes: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.lift, self.down = nn.Linear(1, width), nn.Linear(width, 1)
        self.layers = nn.Sequential(*(Layer(width, modes) for _ in range(layers)))

    def forward(self, start: Any) -> Any:
        """Return the solutions."""
        return start + self.down(self.layers(self.lift(start.unsqueeze(-1)))).squeeze(-1)


def relative(found: Any, expected: Any) -> Any:
    """Return the sum over samples of the squared error by the squared norm."""
    return (((found - expected) ** 2).sum(1) / (expected**2).sum(1)).sum()


def starts(samples: int, rng: np.random.Generator) -> Array:
    """Return periodic Gaussian random fields on the fine grid."""
    modes = np.arange(1, 9)
    size = rng.normal(size=(samples, 8, 2)) * np.exp(-((modes / 4) ** 2))[:, None]
    phase = 2 * np.pi * np.outer(modes, np.arange(FINE) / FINE)
    return size[..., 0] @ np.cos(phase) + size[..., 1] @ np.sin(phase)


def solve(start: Array, steps: int = 400) -> Array:
    """Return u(1, x) on 0 <= x < 2 pi: Fourier modes without aliases, diffusion exactly, Runge and Kutta's method."""
    step, waves = 1 / steps, np.arange(FINE // 2 + 1)
    half = np.exp(-VISCOSITY * waves**2 * step / 2)
    derivative = np.where(waves <= FINE // 3, -0.5j * waves, 0)

    def advection(modes: Array) -> Array:
        return step * derivative * np.fft.rfft(np.fft.irfft(modes, FINE) ** 2)

    modes = np.fft.rfft(start)
    for _ in range(steps):
        a = advection(modes)
        b = advection(half * (modes + a / 2))
        c = advection(half * modes + b / 2)
        d = advection(half**2 * modes + half * c)
        modes = half**2 * (modes + a / 6) + half * (b + c) / 3 + d / 6
    return np.fft.irfft(modes, FINE)


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hash of the parameters, and mean relative errors of starts that were not seen."""

    sha256: str
    error: float
    on_fine_grid: float
    of_start: float
    of_linear: float


def mean_error(found: Array, expected: Array) -> float:
    """Return the mean over samples of the relative error."""
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).mean())


def draw(figure: Any, start: Array, solution: Array, operator: Array, found: Found) -> None:
    """Draw two unseen starts with both solutions on the fine grid, and the errors of all predictions."""
    first, second, errors = figure.subplots(1, 3)
    x = 2 * np.pi * np.arange(FINE) / FINE
    for axes, sample in ((first, 0), (second, 1)):
        axes.plot(x, start[sample], color="gray", linestyle=":", label="start")
        axes.plot(x, solution[sample], color="black", linewidth=1, label="solution")
        axes.plot(x[::6], operator[sample, ::6], "o", color=BLUE, markersize=3.5, label="operator")
        axes.set(title=f"unseen start {sample + 1}", xlabel="x", ylabel="u", xticks=(0, np.pi, 2 * np.pi))
        axes.set_xticklabels(["0", "π", "2π"])
    figure.legend(*first.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    bars = (
        ("start\nitself", found.of_start, "gray"),
        ("linear\noperator", found.of_linear, ORANGE),
        (f"operator,\n{POINTS} points", found.error, BLUE),
        (f"operator,\n{FINE} points", found.on_fine_grid, GREEN),
    )
    names, sizes, colours = zip(*bars, strict=True)
    drawn = errors.barh(names, sizes, color=colours)
    errors.bar_label(drawn, fmt="%.2g", padding=2)
    errors.set(title=f"{UNSEEN} unseen starts", xlabel="mean relative error", xscale="log", xlim=(0.01, 9))
    errors.invert_yaxis()


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train the operator, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    fine = starts(options.samples + UNSEEN, np.random.default_rng(0))
    solved = solve(fine)
    every = FINE // POINTS
    x, y, unseen_x, unseen_y = (
        np.ascontiguousarray(a[part, ::every], np.float32)
        for part in (slice(UNSEEN, None), slice(UNSEEN))
        for a in (fine, solved)
    )
    linear = np.linalg.lstsq(x, y, rcond=1e-3)[0]
    network = TorchModel(Operator, relative)
    adam, config = mz.Adam(lr=mz.optim.cosine(5e-3, options.steps)), mz.Config(micro_batch=BATCH // 8)
    with mz.Mesh(comm) as mesh, mz.distribute(network, adam, "zero1", mesh=mesh, config=config) as model:
        prepared = time.monotonic() - began
        source = mz.data.ArraySource(x, y)
        for batch in mz.data.batches(source, model, global_batch=BATCH, seed=0, steps=options.steps):
            loss = model.train(*batch)
        module = Operator()
        module.load_state_dict(network.state_dict(model.named_parameters()))
        with torch.no_grad():
            coarse, finer = (module(torch.from_numpy(a.astype(np.float32))).numpy() for a in (unseen_x, fine[:UNSEEN]))
        found = Found(
            model.parameters_sha256(),
            mean_error(coarse, unseen_y),
            mean_error(finer, solved[:UNSEEN]),
            mean_error(unseen_x, unseen_y),
            mean_error(unseen_x @ linear, unseen_y),
        )
        if model.rank == 0:
            print(f"{len(fine)} samples solved in {prepared:.1f} s; {options.steps} steps, last loss {loss:.3e}")
            print(f"relative error of {UNSEEN} unseen samples: {found.error:.2e} on {POINTS} points", end=", ")
            print(f"{found.on_fine_grid:.2e} on {FINE}; of the start {found.of_start:.2e}", end=", ")
            print(f"of a linear operator {found.of_linear:.2e}")
            print(f"{time.monotonic() - began:.1f} s; sha256 {found.sha256} on {model.world_size} ranks")
            if options.picture:
                fill = partial(draw, start=fine, solution=solved, operator=finer, found=found)
                save(options.picture, (7, 3), fill)
    return found


if __name__ == "__main__":
    main()
