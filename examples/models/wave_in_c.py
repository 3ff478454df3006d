"""Find a source and the speed of waves, with an adjoint in C that writes gradients in place.

gcc -O2 -shared -fPIC -o libwave.so wave.c && mpiexec -n 4 python wave_in_c.py

A string was struck at known places by the same unknown wavelet; two receivers have recorded what arrived. Sought are
the wavelet and the squared speed of each cell.
"""

import argparse
import ctypes
from pathlib import Path

import numpy as np

import mpizero as mz
from mpizero.testing import check_model

CELLS, STEPS, RECEIVERS = 48, 120, np.array([11, 37], np.int32)


doubles, ints = (np.ctypeslib.ndpointer(kind, flags="C") for kind in (np.float64, np.int32))
_misfit = ctypes.CDLL(str(Path(__file__).with_name("libwave.so"))).misfit
_misfit.restype = ctypes.c_double
_misfit.argtypes = [ctypes.c_int] * 3 + [doubles] * 4 + [ints] + [ctypes.c_void_p] * 2 + [doubles]


def computed(parameters, batch, gradients=None):
    """Call the library: it writes the gradients, if any are wanted, and returns the loss."""
    sources, traces = batch
    wanted = (None, None) if gradients is None else (gradients[name].ctypes.data for name in ("speed2", "wavelet"))
    values = parameters["speed2"], parameters["wavelet"], sources, traces, RECEIVERS
    loss = _misfit(CELLS, STEPS, len(sources), *values, *wanted, np.empty((STEPS + 1) * CELLS))
    return loss, float(len(sources))


def recorded(samples=48, noise=1e-3, seed=0):
    """Return where and how hard the string was struck, and what was recorded; made by another program, in NumPy."""
    rng, time, cell = np.random.default_rng(seed), np.arange(STEPS), np.arange(CELLS)
    wavelet = np.exp(-(((time - 20) / 7) ** 2)) * np.cos((time - 20) / 4)
    speed2 = 0.35 + 0.1 * np.sin(cell / 7) + 0.15 * (cell > 25)
    sources = np.stack([rng.integers(2, CELLS - 2, samples), rng.uniform(0.5, 1.5, samples)], axis=1)
    before = now = np.zeros((samples, CELLS))
    traces = np.empty((samples, STEPS, 2))
    for n in range(STEPS):
        padded = np.pad(now, ((0, 0), (1, 1)))
        after = 2 * now - before + speed2 * (padded[:, 2:] - 2 * now + padded[:, :-2])
        after[np.arange(samples), sources[:, 0].astype(int)] += sources[:, 1] * wavelet[n]
        before, now, traces[:, n] = now, after, after[:, RECEIVERS]
    return sources, traces + noise * rng.normal(size=traces.shape), speed2


def data():
    """Return the samples alone."""
    return recorded()[:2]


def make():
    """Return the model: a string of one speed, and no wavelet yet."""
    start = {"speed2": np.full(CELLS, 0.4), "wavelet": np.zeros(STEPS)}
    return mz.FunctionModel(start, computed, loss=computed, in_place=True)


def main():
    """Read the options, train, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="number of steps (default 300)")
    parser.add_argument("--strategy", default="zero1", help="ddp, zero1, zero2 or zero3 (default zero1)")
    parser.add_argument("--private", action="store_true", help="share no memory between the ranks of a node")
    parser.add_argument("--run", default="run-wave", help="folder of metrics and checkpoints (default run-wave)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    sources, traces, speed2 = recorded()
    check_model(make(), sources[:4], traces[:4], parameters={"speed2": speed2, "wavelet": np.ones(STEPS) / 9})
    with (
        mz.Mesh(share_node_memory=not options.private) as mesh,
        mz.Trainer(
            make(),
            mz.data.ArraySource(sources, traces),
            mz.Config(micro_batch=4),
            mesh=mesh,
            optimizer=mz.Adam(lr=5e-2),
            strategy=options.strategy,
            steps=options.steps,
            global_batch=24,
            run=options.run,
            progress=False,
        ) as trainer,
    ):
        result = trainer.resume() if options.resume else trainer.fit()
        found = np.sqrt(trainer.model.named_parameters()["speed2"])
        if trainer.rank == 0:
            off = np.abs(found - np.sqrt(speed2))[8:40].mean()
            told = f"loss {result.loss:.3f}, speed off by {off:.3f} on average"
            print(f"{told}, {result.parameters_sha256} on {result.ranks} ranks")


if __name__ == "__main__":
    main()
