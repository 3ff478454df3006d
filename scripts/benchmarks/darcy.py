"""Train a Fourier neural operator on Darcy flow by the published rule of data, and print its error after each epoch.

The rule is that of Li et al., 2021, section 5.2: the permeability is 12 or 3 where a Gaussian random field of the
covariance ``(-laplacian + 9)**-2`` is positive or negative; the pressure of ``-div(a grad u) = 1``, which is 0 at the
edges, is computed by finite differences on 421 x 421 points, of which every fifth is kept: 85 x 85. There are 1,000
samples of the training and 100 others, batches of 20, and the loss is the relative error. The paper trains for 500
epochs and prints 0.0108. Here the rate falls by half a cosine over the epochs of the command line.

Samples are computed in one process, by conjugate gradients, and kept in the file that --data names.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.options import parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import mpizero as mz

Array = np.ndarray[Any, Any]
HIGH, LOW, UNSEEN, BATCH = 12.0, 3.0, 100, 20
#: Points of an axis of the grid on which samples are solved, and which of them are kept.
POINTS, EVERY = 421, 5


def permeability(rng: np.random.Generator, points: int) -> Array:
    """Return one permeability (points, points), drawn by a cosine series of all waves of the grid but the constant."""
    waves = np.arange(points)
    cosines = np.cos(np.pi * np.outer(waves, (waves + 0.5) / points))
    sizes = rng.normal(size=(points, points)) / (np.pi**2 * (waves[:, None] ** 2 + waves**2) + 9)
    sizes[0, 0] = 0
    sizes[0] /= np.sqrt(2)
    sizes[:, 0] /= np.sqrt(2)
    return np.where(cosines.T @ sizes @ cosines >= 0, HIGH, LOW)


class Solver:
    """Solve the equation on the inner points of a grid, preconditioned by the inverse of the Laplace operator."""

    def __init__(self, points: int) -> None:
        inner, self.spacing = points - 2, 1 / (points - 1)
        waves = np.arange(1, inner + 1)
        self.sines = np.sin(np.pi * np.outer(waves, waves) * self.spacing).astype(np.float32)
        own = 4 * np.sin(np.pi * waves * self.spacing / 2) ** 2
        self.inverse = ((2 * self.spacing) ** 2 / (own[:, None] + own)).astype(np.float32)

    def laplace(self, r: Array) -> Array:
        """Return the solution of the equation with permeability 1."""
        return (self.sines @ (self.inverse * (self.sines @ r.astype(np.float32) @ self.sines)) @ self.sines).astype(
            np.float64
        )

    def solve(self, a: Array, tolerance: float = 1e-6) -> Array:
        """Return the pressure at all points for the permeability ``a`` at all points."""
        across, along = (a[1:] + a[:-1])[:, 1:-1] / 2, (a[:, 1:] + a[:, :-1])[1:-1] / 2
        wide = np.zeros_like(a)
        inside = wide[1:-1, 1:-1]

        def flows(u: Array) -> Array:
            inside[...] = u
            first, second = across * np.diff(wide[:, 1:-1], axis=0), along * np.diff(wide[1:-1], axis=1)
            return first[:-1] - first[1:] + second[:, :-1] - second[:, 1:]

        u, rest = np.zeros_like(inside), np.full_like(inside, self.spacing**2)
        limit, size, direction = tolerance * np.linalg.norm(rest), 1.0, np.zeros_like(inside)
        while np.linalg.norm(rest) > limit:
            better = self.laplace(rest)
            size, before = float((rest * better).sum()), size
            direction = better + size / before * direction
            flow = flows(direction)
            step = size / (direction * flow).sum()
            u, rest = u + step * direction, rest - step * flow
        return np.pad(u, 1)


def samples(count: int, path: Path) -> tuple[Array, Array]:
    """Return permeabilities and pressures (count, points kept, points kept), from the file if it has them."""
    if path.exists():
        with np.load(path) as file:
            return file["a"], file["u"]
    solver, found = Solver(POINTS), []
    for number in range(count):
        a = permeability(np.random.default_rng([0, number]), POINTS)
        found.append((a[::EVERY, ::EVERY], solver.solve(a)[::EVERY, ::EVERY]))
    a, u = (np.stack(part) for part in zip(*found, strict=True))
    np.savez(path, a=a, u=u)
    return a, u


def main() -> None:
    """Train, and print errors."""
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=30)
    options.add_argument("--samples", type=int, default=1000, help="of the training")
    options.add_argument("--data", type=Path, required=True, help="file of the samples, made if it does not exist")
    given, began = options.parse_args(), time.monotonic()
    a, u = samples(given.samples + UNSEEN, given.data)
    print(f"{len(a)} samples of {a.shape[1]} x {a.shape[2]} after {time.monotonic() - began:.0f} s", flush=True)
    scale = u[UNSEEN:].std()
    x, y = ((2 * a - HIGH - LOW) / (HIGH - LOW))[..., None].astype(np.float32), (u / scale)[..., None].astype("f4")
    steps = given.epochs * (given.samples // BATCH)
    net = mz.nn.FNO(1, 1, axes=2, modes=12, width=32, padding=0.1, loss="relative_l2", space=x.shape[1:3])
    adam, config = mz.AdamW(lr=mz.optim.cosine(4e-3, steps), weight_decay=1e-4), mz.Config(micro_batch=5)
    began, losses = time.monotonic(), []
    with mz.Mesh("self") as mesh, mz.distribute(net, adam, "ddp", mesh=mesh, config=config) as model:
        source = mz.data.ArraySource(x[UNSEEN:], y[UNSEEN:])
        for step, batch in enumerate(mz.data.batches(source, model, global_batch=BATCH, seed=0, steps=steps), start=1):
            losses.append(model.train(*batch))
            if step * BATCH % given.samples == 0:
                found = model.predict(x[:UNSEEN])
                error = np.linalg.norm((found - y[:UNSEEN]).reshape(UNSEEN, -1), axis=1)
                error /= np.linalg.norm(y[:UNSEEN].reshape(UNSEEN, -1), axis=1)
                print(
                    f"epoch {step * BATCH // given.samples}: loss {np.mean(losses):.4e}, unseen {error.mean():.4e}, "
                    f"{time.monotonic() - began:.0f} s",
                    flush=True,
                )
                losses = []


if __name__ == "__main__":
    main()
