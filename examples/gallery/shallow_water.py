#!/usr/bin/env python
"""Learn time steps of shallow water on a rotating plane through rollouts, on a grid that may be cut over ranks.

    mpiexec -n 4 python examples/gallery/shallow_water.py --domain 2 2

The state is the height of the water's surface and its velocity along both axes, on a periodic square. This file solves
the equations, with derivatives by Fourier transforms and Runge and Kutta's method. A Fourier neural operator learns the
change of the state in a time step: from single steps, and then through rollouts, in which it is applied to its own
output and the gradient goes back through all steps (mz.nn.Rollout). After each of both trainings it goes 50 steps from
starts that training has not seen. The bits of the parameters depend on no number of ranks and no cut. The printed
errors are mean relative ones of the whole state, of both operators and of a state that stays as it was at the start.
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
#: Points of an axis, series of the training, updates from single steps, and modes; without and with --small.
LARGE, SMALL = (32, 32, 400, 12), (16, 6, 40, 6)
GRAVITY, ROTATION, VISCOSITY, DEPTH = 1.0, 1.0, 0.01, 1.0
#: Time between two states, in how many parts the solver goes, states of a series, and how many series are unseen.
STEP, PARTS, SERIES, UNSEEN, BATCH = 0.4, 8, 24, 4, 8


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", type=int, nargs=2, default=(1, 1), metavar="N", help="parts of both axes")
    parser.add_argument("--small", action="store_true", help="a small grid, few samples and updates, in seconds")
    parser.add_argument("--updates", type=int, help=f"from single steps, half as many through rollouts ({LARGE[2]})")
    parser.add_argument(
        "--unrolled", type=int, default=4, metavar="N", help="steps of a rollout in training (%(default)s)"
    )
    parser.add_argument("--rollout", type=int, default=50, metavar="N", help="steps of the emulator (%(default)s)")
    add_option(parser, "the height of the water, true and emulated, and the errors of all steps")
    options = parser.parse_args(arguments)
    options.points, options.series, updates, options.modes = SMALL if options.small else LARGE
    options.updates = updates if options.updates is None else options.updates
    for name in ("updates", "unrolled", "rollout"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    if options.unrolled >= SERIES:
        parser.error(f"--unrolled {options.unrolled}: a series has {SERIES} states; expected fewer")
    return options


def starts(count: int, points: int, rng: np.random.Generator) -> Array:
    """Return states (count, points, points, 3): heights of random long waves around 0, and water at rest."""
    waves = np.arange(-2, 3)
    size = rng.normal(size=(count, 5, 5, 2)) @ (1, 1j)
    phase = np.exp(2j * np.pi * np.outer(waves, np.arange(points)) / points)
    height = np.einsum("cij,ix,jy->cxy", size, phase, phase).real
    height -= height.mean(axis=(1, 2), keepdims=True)
    state = np.zeros((*height.shape, 3))
    state[..., 0] = 0.1 * height / np.sqrt((height**2).mean(axis=(1, 2), keepdims=True))
    return state


def solve(state: Array, steps: int) -> Array:
    """Return states (steps + 1, count, points, points, 3) at the start and after each time step."""
    points, h, series = state.shape[1], STEP / PARTS, [state]
    wave = np.fft.fftfreq(points, 1 / points)[:, None], np.arange(points // 2 + 1)
    kept = (abs(wave[0]) < points / 3) & (wave[1] < points / 3)  # products of fields have no aliases
    along = [(1j * k * kept)[..., None] for k in wave]
    smooth = (VISCOSITY * (wave[0] ** 2 + wave[1] ** 2) * kept)[..., None]

    def rate(state: Array) -> Array:
        modes = np.fft.rfft2(state, axes=(1, 2))
        east, north, less = (np.fft.irfft2(one * modes, (points, points), axes=(1, 2)) for one in (*along, smooth))
        u, v = state[..., 1:2], state[..., 2:]
        change = -u * east - v * north - less
        change[..., 0] -= (DEPTH + state[..., 0]) * (east[..., 1] + north[..., 2])
        change[..., 1] += ROTATION * state[..., 2] - GRAVITY * east[..., 0]
        change[..., 2] += -ROTATION * state[..., 1] - GRAVITY * north[..., 0]
        return change

    for part in range(steps * PARTS):
        a = rate(state)
        b = rate(state + h / 2 * a)
        c = rate(state + h / 2 * b)
        state = state + h / 6 * (a + 2 * b + 2 * c + rate(state + h * c))
        if part % PARTS == PARTS - 1:
            series.append(state)
    return np.stack(series)


def windows(series: Array, steps: int) -> tuple[Array, Array]:
    """Return all states that ``steps`` others follow, and these, one after the other on the last axis."""
    count = len(series) - steps
    after = np.concatenate([series[k : k + count] for k in range(1, steps + 1)], axis=-1)
    x, y = (one.reshape(-1, *one.shape[2:]).astype(np.float32) for one in (series[:count], after))
    return x, y


@dataclass(frozen=True)
class Found:
    """Hold what is compared: the hashes of both operators' parameters, and errors after the first and the last step."""

    sha256: tuple[str, str]
    first: tuple[float, float]
    last: tuple[float, float]
    of_start: float


def errors_of(found: Array, expected: Array) -> Array:
    """Return the relative error of each state (steps, count, points, points, 3), as a mean over the second axis."""
    axes = (2, 3, 4)
    return (np.sqrt(((found - expected) ** 2).sum(axes)) / np.sqrt((expected**2).sum(axes))).mean(axis=1)


def draw(figure: Any, emulated: Array, truth: Array, errors: dict[str, Array]) -> None:
    """Draw the true and the emulated height at four times, and the errors of all steps."""
    times = np.linspace(0, len(truth) - 1, 4).astype(int)
    axes = figure.subplots(2, 5, width_ratios=(1, 1, 1, 1, 1.4))
    for row, (name, states) in enumerate((("true", truth), ("emulated", emulated))):
        for place, n in enumerate(times):
            axes[row, place].imshow(states[n, 0, :, :, 0].T, origin="lower", cmap="RdBu_r", vmin=-0.2, vmax=0.2)
            axes[row, place].set(xticks=(), yticks=(), title="" if row else f"step {n}")
        axes[row, 0].set_ylabel(name)
    grid = axes[0, 4].get_gridspec()
    for row in (0, 1):
        axes[row, 4].remove()
    panel = figure.add_subplot(grid[:, 4])
    for (name, sizes), color in zip(errors.items(), ("gray", GREEN, BLUE), strict=True):
        panel.plot(range(1, len(truth)), sizes[1:], color=color, label=name)
    panel.set(title="relative error", xlabel="step", yscale="log")
    panel.legend(fontsize=7)


def main(arguments: Sequence[str] | None = None, comm: Any = None) -> Found:
    """Train both operators, let them run, report on rank 0, and return what was found. Collective over ``comm``."""
    options, began = parse(arguments), time.monotonic()
    space = (options.points,) * 2
    begins = starts(UNSEEN + options.series, options.points, np.random.default_rng(0))
    series = solve(begins[UNSEEN:], SERIES - 1)
    truth = solve(begins[:UNSEEN], options.rollout)
    scale = series.std(axis=(0, 1, 2, 3))
    step = mz.nn.FNO(
        inputs=3, outputs=3, axes=2, modes=options.modes, width=20, layers=3, coordinates=False, space=space
    )
    config, parameters, hashes, emulated = mz.Config(micro_batch=BATCH // 4), {}, [], []
    with mz.Mesh(comm, domain=tuple(options.domain)) as mesh:
        here = mesh.slab(space)
        for steps, updates, rate in ((1, options.updates, 4e-3), (options.unrolled, (options.updates + 1) // 2, 2e-3)):
            net, adam = mz.nn.Rollout(step, steps, residual=True), mz.Adam(lr=mz.optim.cosine(rate, updates))
            source = mz.data.ArraySource(*windows(series / scale, steps))
            with mz.distribute(net, adam, "zero2", mesh=mesh, config=config) as model:
                if parameters:
                    model.load_named(parameters)  # rollouts of any length have the same
                for batch in mz.data.batches(source, model, global_batch=BATCH, seed=0, steps=updates):
                    loss = model.train(*batch)  # this rank's part of every sample
                parameters = model.named_parameters()
                part = (truth[0][:, *here] / scale).astype(np.float32)
                parts = [part]
                while len(parts) <= options.rollout:
                    states = model.predict(parts[-1])  # as many as in training
                    parts += np.split(states, steps, axis=-1)
                whole = np.empty(truth.shape)
                for place, states in mesh.communicator.allgather_object((here, np.stack(parts[: len(truth)]))):
                    whole[:, :, *place] = scale * states
                emulated.append(whole)
                hashes.append(model.parameters_sha256())
            if mesh.rank == 0:
                print(
                    f"{updates} updates through {steps} steps, last loss {loss:.3e}, {time.monotonic() - began:.1f} s"
                )
        stays = errors_of(np.broadcast_to(truth[0], truth.shape), truth)
        single, unrolled = (errors_of(one, truth) for one in emulated)
        pairs = [(float(single[n]), float(unrolled[n])) for n in (1, -1)]
        found = Found((hashes[0], hashes[1]), pairs[0], pairs[1], float(stays[-1]))
        if mesh.rank == 0:
            cut = " x ".join(map(str, options.domain))
            print(f"grid of {space[0]} x {space[1]} cut {cut}; mean relative error of {UNSEEN} unseen starts", end=" ")
            print(f"after 1 and {options.rollout} steps:")
            for name, first, last in zip(("single steps", "rollouts"), found.first, found.last, strict=True):
                print(f"from {name} {first:.2e}, {last:.2e}", end="; ")
            print(f"of a state that stays {found.of_start:.2e}")
            print(f"{time.monotonic() - began:.1f} s; sha256 {found.sha256[1]} on {mesh.size} ranks")
            if options.picture:
                errors = {"stays": stays, "single steps": single, "rollouts": unrolled}
                save(options.picture, (9, 3.2), partial(draw, emulated=emulated[1], truth=truth, errors=errors))
    return found


if __name__ == "__main__":
    main()
