#!/usr/bin/env python
"""Solve Burgers' equation by a physics-informed neural network with PyTorch: Adam first, then L-BFGS.

    mpiexec -n 4 python examples/gallery/physics_informed.py

The equation is u_t + u u_x = nu u_xx for -1 < x < 1 and 0 < t < 1, with u = -sin(pi x) at t = 0 and u = 0 at the edges
(Raissi, Perdikaris & Karniadakis 2019). The network's ansatz has these values, so the loss is the squared residual of
the equation at collocation points alone. The points are the samples: each rank computes the residuals of some, and the
bits of the parameters depend on no number of ranks. The reference is the exact solution, which Cole and Hopf's
transformation gives as a quotient of two integrals. Needs PyTorch (pip install torch).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drawing import BLUE, ORANGE, add_option, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for PyTorch: each rank computes with one thread

import numpy as np  # noqa: E402

import mpizero as mz  # noqa: E402

Array = np.ndarray[Any, Any]
VISCOSITY = 0.1 / math.pi
#: Collocation points, steps of Adam, iterations of L-BFGS; without and with --small.
LARGE = {"points": 2048, "steps": 200, "iterations": 300}
SMALL = {"points": 256, "steps": 60, "iterations": 100}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few points and iterations, in seconds")
    for name, what in (("steps", "of Adam"), ("iterations", "of L-BFGS after them")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: {LARGE[name]}; {SMALL[name]} with --small)")
    add_option(parser, "the solution, and both stages of the training beside the exact one")
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    given.setdefault("picture", None)
    for name in {"steps", "iterations"} & given.keys():
        if given[name] < 1:
            parser.error(f"--{name} {given[name]}: expected at least 1")
    return argparse.Namespace(**{**(SMALL if options.small else LARGE), **given})


try:
    import torch
    from torch import nn

    from mpizero.adapters.torch import TorchModel
except ModuleNotFoundError:
    parse()  # --help works without it
    sys.exit("this example needs PyTorch, which is missing: pip install torch")


class Residual(nn.Module):
    """Compute what the network leaves of the equation at points ``(t, x)``."""

    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        sizes = [2, *[width] * layers]
        hidden = [part for pair in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(*pair), nn.Tanh())]
        self.network = nn.Sequential(*hidden, nn.Linear(width, 1)).double()

    def solution(self, t: Any, x: Any) -> Any:
        """Return u at points: the start values, and what the network adds inside of the edges after the start."""
        inputs = torch.stack([2 * t - 1, x], dim=-1)
        return -torch.sin(math.pi * x) + t * (1 - x**2) * self.network(inputs).squeeze(-1)

    def forward(self, points: Any) -> Any:
        """Return the residual at each point."""
        with torch.enable_grad():
            t, x = (points[:, i].detach().requires_grad_() for i in range(2))
            u = self.solution(t, x)
            u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
            return u_t + u * u_x - VISCOSITY * u_xx


def squared(residual: Any, target: Any) -> Any:
    """Return the sum of squares over points."""
    return ((residual - target) ** 2).sum()


def exact(t: Array, x: Array) -> Array:
    """Return Cole and Hopf's solution at points, by Gauss and Hermite's quadrature; t > 0."""
    nodes, weights = np.polynomial.hermite.hermgauss(120)
    at = x[:, None] - np.sqrt(4 * VISCOSITY * t)[:, None] * nodes
    factor = weights * np.exp(-(np.cos(np.pi * at) - 1) / (2 * np.pi * VISCOSITY))
    return -(np.sin(np.pi * at) * factor).sum(1) / factor.sum(1)


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hash of the parameters, and the relative error of u after Adam and after L-BFGS."""

    sha256: str
    after_adam: float
    error: float


#: Times and places at which solutions are compared.
TIMES, PLACES = np.linspace(0.01, 1, 100), np.linspace(-1, 1, 201)


def solution_of(network: TorchModel, model: Any) -> Array:
    """Return the network's u at all times and places. Collective."""
    module = Residual()
    module.load_state_dict(network.state_dict(model.named_parameters()))
    with torch.no_grad():
        return module.solution(*map(torch.from_numpy, np.meshgrid(TIMES, PLACES, indexing="ij"))).numpy()


def error_of(found: Array) -> float:
    """Return the relative error of u, in the mean square over times and places."""
    reference = np.stack([exact(np.full_like(PLACES, t), PLACES) for t in TIMES])
    return float(np.linalg.norm(found - reference) / np.linalg.norm(reference))


def draw(figure: Any, early: Array, late: Array) -> None:
    """Draw u after L-BFGS, and its profiles after Adam and after L-BFGS beside the exact ones."""
    whole, *parts = figure.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
    image = whole.pcolormesh(TIMES, PLACES, late.T, cmap="RdBu_r", vmin=-1, vmax=1, rasterized=True)
    whole.set(title="u, found", xlabel="t", ylabel="x")
    figure.colorbar(image, ax=whole, location="left", ticks=(-1, 0, 1))
    for axes, t in zip(parts, (24, 49, 99), strict=True):
        whole.axvline(TIMES[t], color="black", linestyle=":", linewidth=1)
        axes.plot(PLACES, exact(np.full_like(PLACES, TIMES[t]), PLACES), color="black", linewidth=1, label="exact")
        axes.plot(PLACES, early[t], color=ORANGE, linestyle="--", label="after Adam")
        axes.plot(PLACES[::8], late[t, ::8], "o", color=BLUE, markersize=3.5, label="after L-BFGS")
        axes.set(title=f"u at t = {TIMES[t]:.2f}", xlabel="x", ylim=(-1.1, 1.1), xticks=(-1, 0, 1))
        axes.set_yticks((-1, 0, 1), labels=("-1", "0", "1") if axes is parts[0] else ("", "", ""))
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train the network, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    low, high = np.array([0.0, -1.0]), np.array([1.0, 1.0])
    points = np.random.default_rng(0).uniform(low, high, (options.points, 2))
    source = mz.data.ArraySource(points, np.zeros(options.points))
    network = TorchModel(Residual, squared)
    config = mz.Config(micro_batch=options.points // 8)
    with mz.Mesh(comm) as mesh, mz.distribute(network, mz.Adam(lr=5e-3), "zero1", mesh=mesh, config=config) as model:
        for batch in mz.data.batches(source, model, global_batch=options.points, seed=0, steps=options.steps):
            loss = model.train(*batch)
        early, speaks = solution_of(network, model), model.rank == 0
        after_adam = error_of(early)
        if speaks:
            print(f"Adam: loss {loss:.3e}, error {after_adam:.2e}, {time.monotonic() - began:.1f} s", flush=True)
        limits = {"maxiter": options.iterations, "gtol": 1e-7, "history": 50}
        fit = mz.minimize(model, source, options=limits)
        late = solution_of(network, model)
        found = Found(model.parameters_sha256(), after_adam, error_of(late))
        if speaks:
            print(f"L-BFGS: loss {fit.fun:.3e} after {fit.nit} iterations and {fit.nfev} evaluations")
            print(f"relative error {found.error:.2e}; {time.monotonic() - began:.1f} s; ", end="")
            print(f"sha256 {found.sha256} on {model.world_size} ranks")
            if options.picture:
                save(options.picture, (7, 3), partial(draw, early=early, late=late))
    return found


if __name__ == "__main__":
    main()
