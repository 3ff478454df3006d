#!/usr/bin/env python
"""Learn a time step of a field that a wind carries and diffusion smooths, on a grid that is cut over ranks.

    mpiexec -n 4 python examples/gallery/advected_field.py --domain 2 2

The field c on a periodic grid obeys c_t + w . grad c = 0.01 laplacian c; its wind w, around four vortices, does not
change. This file solves the equation, with derivatives by Fourier transforms and Runge and Kutta's method. A U-Net is
given field and wind and learns the change in a time step. Each rank has its box of all fields; ranks that the domain
does not need make replicas. The bits of the parameters depend on no number of ranks and no cut. Then the emulator
makes 50 steps from a start that training has not seen: each rank predicts its box from its box of the step before. The
printed errors are relative ones, of the emulator and of a field that stays as it was at the start.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from drawing import BLUE, add_option, save

import mpizero as mz

Array = np.ndarray[Any, Any]
#: Points of an axis, series of the training, and its steps; without and with --small.
LARGE, SMALL = (32, 48, 700), (16, 8, 60)
DIFFUSION, STEP, PARTS, BATCH = 0.01, 0.2, 4, 8
#: Time steps of a series, and how many of them training sees.
SERIES, SEEN = 48, 8


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=int, nargs=2, default=(1, 1), metavar="N", help="parts of both axes")
    parser.add_argument("--small", action="store_true", help="a small grid, few samples and steps, in seconds")
    parser.add_argument("--steps", type=int, help=f"of the training (default: {LARGE[2]}; {SMALL[2]} with --small)")
    parser.add_argument("--rollout", type=int, default=50, metavar="N", help="steps of the emulator (%(default)s)")
    add_option(parser, "the emulator's fields beside the true ones")
    options = parser.parse_args(arguments)
    options.points, options.series, steps = SMALL if options.small else LARGE
    options.steps = steps if options.steps is None else options.steps
    for name in ("steps", "rollout"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    return options


def wind_on(points: int) -> Array:
    """Return the wind (points, points, 2) around four vortices, which has no divergence."""
    x = 2 * np.pi * np.arange(points) / points
    return np.stack([np.outer(np.sin(x), np.cos(x)), -np.outer(np.cos(x), np.sin(x))], axis=-1)


def starts(count: int, points: int, rng: np.random.Generator) -> Array:
    """Return sums of random waves (count, points, points) whose mean square is 1."""
    waves = np.arange(-3, 4)
    size = rng.normal(size=(count, 7, 7, 2)) @ (1, 1j)
    phase = np.exp(2j * np.pi * np.outer(waves, np.arange(points)) / points)
    fields = np.einsum("cij,ix,jy->cxy", size, phase, phase).real
    return fields / np.sqrt((fields**2).mean(axis=(1, 2), keepdims=True))


def solve(field: Array, wind: Array, steps: int) -> Array:
    """Return fields (count, points, points) at the start and after each time step, the time first."""
    points, h, series = field.shape[-1], STEP / PARTS, [field]
    wave = np.fft.fftfreq(points, 1 / points)[:, None], np.arange(points // 2 + 1)
    slope = [1j * np.where(abs(k) < points / 2, k, 0) for k in wave]
    decay = DIFFUSION * (wave[0] ** 2 + wave[1] ** 2)

    def rate(field: Array) -> Array:
        modes = np.fft.rfft2(field)
        east, north, smooth = (np.fft.irfft2(factor * modes, (points, points)) for factor in (*slope, decay))
        return -wind[..., 0] * east - wind[..., 1] * north - smooth

    for part in range(steps * PARTS):
        a = rate(field)
        b = rate(field + h / 2 * a)
        c = rate(field + h / 2 * b)
        field = field + h / 6 * (a + 2 * b + 2 * c + rate(field + h * c))
        if part % PARTS == PARTS - 1:
            series.append(field)
    return np.stack(series)


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hash of the parameters, and relative errors after the first and the last step."""

    sha256: str
    first: float
    last: float
    of_start: float


def relative(found: Array, expected: Array) -> float:
    """Return the norm of the error by the norm of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def draw(figure: Any, emulated: Array, truth: Array) -> None:
    """Draw the true and the emulated field at four times, and the errors of all steps."""
    times = np.linspace(0, len(truth) - 1, 4).astype(int)
    axes = figure.subplots(2, 5, width_ratios=(1, 1, 1, 1, 1.4))
    for row, (name, fields) in enumerate((("true", truth), ("emulated", emulated))):
        for place, n in enumerate(times):
            axes[row, place].imshow(fields[n].T, origin="lower", cmap="RdBu_r", vmin=-2, vmax=2)
            axes[row, place].set(xticks=(), yticks=(), title="" if row else f"step {n}")
        axes[row, 0].set_ylabel(name)
    grid = axes[0, 4].get_gridspec()
    for row in (0, 1):
        axes[row, 4].remove()
    errors = figure.add_subplot(grid[:, 4])
    size = [relative(one, other) for one, other in zip(emulated[1:], truth[1:], strict=True)]
    errors.plot(range(1, len(truth)), size, color=BLUE, label="emulator")
    errors.plot(range(1, len(truth)), [relative(truth[0], other) for other in truth[1:]], ":", color="gray")
    errors.set(title="relative error", xlabel="step (dotted: of the start)", yscale="log")


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train the emulator, let it run, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    space = (options.points,) * 2
    wind = wind_on(options.points)
    series = solve(starts(options.series + 1, options.points, np.random.default_rng(0)), wind, SERIES)
    before, after = (np.concatenate(series[k : SERIES : SERIES // SEEN, 1:])[..., None] for k in (0, 1))
    truth = solve(series[0, :1], wind, options.rollout)[:, 0]
    scale = float((after - before).std())
    x = np.concatenate([before, np.broadcast_to(wind, (len(before), *wind.shape))], axis=-1).astype(np.float32)
    y = ((after - before) / scale).astype(np.float32)

    net = mz.nn.UNet(
        inputs=3, outputs=1, axes=2, width=16, levels=2, groups=2, activation="gelu", padding="periodic", space=space
    )
    adam, config = mz.Adam(lr=mz.optim.cosine(5e-3, options.steps)), mz.Config(micro_batch=BATCH // 4)
    with (
        mz.Mesh(comm, domain=tuple(options.domain)) as mesh,
        mz.distribute(net, adam, "zero2", mesh=mesh, config=config) as model,
    ):
        here = mesh.slab(space)
        source = mz.data.ArraySource(x, y)
        for batch in mz.data.batches(source, model, global_batch=BATCH, seed=0, steps=options.steps):
            loss = model.train(*batch)  # this rank's part of every sample
        trained, part = time.monotonic() - began, truth[0][here][None, ..., None].astype(np.float32)
        parts, blowing = [part], wind[here][None].astype(np.float32)
        for _ in range(options.rollout):
            part = part + np.float32(scale) * model.predict(np.concatenate([part, blowing], axis=-1))
            parts.append(part)
        emulated = np.empty_like(truth)
        for place, fields in mesh.communicator.allgather_object((here, np.concatenate(parts)[..., 0])):
            emulated[:, *place] = fields
        errors = relative(emulated[1], truth[1]), relative(emulated[-1], truth[-1]), relative(truth[0], truth[-1])
        found = Found(model.parameters_sha256(), *errors)
        if model.rank == 0:
            cut, box = " x ".join(map(str, options.domain)), " x ".join(map(str, part.shape[1:3]))
            print(f"grid of {space[0]} x {space[1]} cut {cut}: {box} points on rank 0; {len(x)} samples", end=", ")
            print(f"{options.steps} steps in {trained:.1f} s, last loss {loss:.3e}")
            print(f"relative error of an unseen start: {found.first:.2e} after a step, {found.last:.2e}", end=" ")
            print(f"after {options.rollout}; of a field that stays {found.of_start:.2e}")
            print(f"{time.monotonic() - began:.1f} s; sha256 {found.sha256} on {model.world_size} ranks")
            if options.picture:
                save(options.picture, (9, 3.2), partial(draw, emulated=emulated, truth=truth))
    return found


if __name__ == "__main__":
    main()
