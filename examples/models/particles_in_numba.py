"""Learn a force from the motion of particles, with an adjoint in Numba: mpiexec -n 4 python particles_in_numba.py.

A sample is a handful of particles: their places and velocities at the start, and their places some time later. The
force between two of them depends on their distance alone and is sought as a sum of bells; the motion is integrated by
leapfrog.
"""

import argparse

import numpy as np
from numba import njit

import mpizero as mz
from mpizero.testing import check_model

PARTICLES, STEPS, DT, WIDTH = 6, 12, 0.08, 0.35
CENTRES = np.linspace(0.2, 3.0, 12)


@njit(cache=True)
def radial(r, weights):
    """Return the force at distance r and its slope."""
    force = slope = 0.0
    for k in range(weights.size):
        z = (r - CENTRES[k]) / WIDTH
        bell = weights[k] * np.exp(-0.5 * z * z)
        force += bell
        slope -= bell * z / WIDTH
    return force, slope


@njit(cache=True)
def accelerate(x, weights, a):
    """Write the acceleration of each particle at the places x."""
    a[:] = 0.0
    for i in range(PARTICLES):
        for j in range(i):
            dx, dy = x[i, 0] - x[j, 0], x[i, 1] - x[j, 1]
            r = np.sqrt(dx * dx + dy * dy + 1e-12)
            push = radial(r, weights)[0] / r
            a[i, 0] += push * dx
            a[i, 1] += push * dy
            a[j, 0] -= push * dx
            a[j, 1] -= push * dy


@njit(cache=True)
def accelerate_adjoint(x, weights, by_a, by_x, by_weights):
    """Add the derivatives by places and weights, given those by the accelerations."""
    for i in range(PARTICLES):
        for j in range(i):
            dx, dy = x[i, 0] - x[j, 0], x[i, 1] - x[j, 1]
            r = np.sqrt(dx * dx + dy * dy + 1e-12)
            force, slope = radial(r, weights)
            ax, ay = by_a[i, 0] - by_a[j, 0], by_a[i, 1] - by_a[j, 1]
            along = (ax * dx + ay * dy) / r
            for k in range(weights.size):
                z = (r - CENTRES[k]) / WIDTH
                by_weights[k] += np.exp(-0.5 * z * z) * along
            turn = (slope - force / r) * along / r
            bx, by = force / r * ax + turn * dx, force / r * ay + turn * dy
            by_x[i, 0] += bx
            by_x[i, 1] += by
            by_x[j, 0] -= bx
            by_x[j, 1] -= by


@njit(cache=True)
def misfit(weights, starts, ends, by_weights):
    """Return the sum of squared misses over the samples; overwrite the gradient, where there is room for it."""
    loss, wanted = 0.0, by_weights.size > 0
    by_weights[:] = 0.0
    places = np.empty((STEPS + 1, PARTICLES, 2))
    v, a = np.empty((PARTICLES, 2)), np.empty((PARTICLES, 2))
    by_x, by_v, by_a = np.empty((PARTICLES, 2)), np.empty((PARTICLES, 2)), np.empty((PARTICLES, 2))
    for sample in range(starts.shape[0]):
        for i in range(PARTICLES):
            for c in range(2):
                places[0, i, c], v[i, c], by_v[i, c] = starts[sample, 0, i, c], starts[sample, 1, i, c], 0.0
        for step in range(STEPS):  # kick and drift
            accelerate(places[step], weights, a)
            for i in range(PARTICLES):
                for c in range(2):
                    v[i, c] += DT * a[i, c]
                    places[step + 1, i, c] = places[step, i, c] + DT * v[i, c]
        for i in range(PARTICLES):
            for c in range(2):
                miss = places[STEPS, i, c] - ends[sample, i, c]
                loss += miss * miss
                by_x[i, c] = 2 * miss
        for step in range(STEPS - 1, -1 if wanted else STEPS - 1, -1):
            for i in range(PARTICLES):
                for c in range(2):
                    by_v[i, c] += DT * by_x[i, c]
                    by_a[i, c] = DT * by_v[i, c]
            accelerate_adjoint(places[step], weights, by_a, by_x, by_weights)
    return loss


def loss_and_grad(parameters, batch, gradients):
    """Compute the loss and write the gradient."""
    return misfit(parameters["weights"], *batch, gradients["weights"]), float(len(batch[0]))


def loss(parameters, batch):
    """Return the loss without a gradient, for evaluate."""
    return misfit(parameters["weights"], *batch, np.empty(0)), float(len(batch[0]))


def data(samples=96, seed=0):
    """Return starts and ends of a motion under another force: repulsion near by, attraction farther away."""
    rng = np.random.default_rng(seed)
    starts = np.stack(
        [rng.uniform(-1.5, 1.5, (samples, PARTICLES, 2)), rng.normal(0, 0.2, (samples, PARTICLES, 2))], axis=1
    )
    x, v = starts[:, 0].copy(), starts[:, 1].copy()
    for _ in range(STEPS):
        d = x[:, :, None] - x[:, None]
        r = np.sqrt((d**2).sum(axis=3, keepdims=True) + 1e-12)
        v += DT * (force_law(r) * d / r).sum(axis=2)
        x += DT * v
    return starts, x


def force_law(r):
    """Return the true force at the distances r; positive pushes apart."""
    return 2.0 * np.exp(-2.0 * r) - 0.6 * np.exp(-((r - 1.6) ** 2))


def make():
    """Return the model: particles without any force."""
    start = {"weights": np.zeros(CENTRES.size)}
    return mz.FunctionModel(start, loss_and_grad, loss=loss, in_place=True)


def main():
    """Read the options, train, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=150, help="number of steps (default 150)")
    parser.add_argument("--strategy", default="zero1", help="ddp, zero1, zero2 or zero3 (default zero1)")
    parser.add_argument("--private", action="store_true", help="share no memory between the ranks of a node")
    parser.add_argument(
        "--run", default="run-particles", help="folder of metrics and checkpoints (default run-particles)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    starts, ends = data()
    check_model(make(), starts[:4], ends[:4])
    with (
        mz.Mesh(share_node_memory=not options.private) as mesh,
        mz.Trainer(
            make(),
            mz.data.ArraySource(starts, ends),
            mz.Config(micro_batch=4),
            mesh=mesh,
            optimizer=mz.Adam(lr=5e-2),
            strategy=options.strategy,
            steps=options.steps,
            global_batch=32,
            run=options.run,
            progress=False,
        ) as trainer,
    ):
        result = trainer.resume() if options.resume else trainer.fit()
        weights, r = trainer.model.named_parameters()["weights"], np.linspace(0.4, 2.4, 50)
        if trainer.rank == 0:
            found = np.array([radial(one, weights)[0] for one in r])
            off = np.abs(found - force_law(r)).mean()
            told = f"loss {result.loss:.1e}, force off by {off:.3f} on average"
            print(f"{told}, {result.parameters_sha256} on {result.ranks} ranks")


if __name__ == "__main__":
    main()
