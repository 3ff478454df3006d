"""Recognize digits by a residual network with batch normalization, in NumPy: mpiexec -n 4 python residual_in_numpy.py.

Layers that are written by hand: a convolution, a batch normalization whose running statistics every step averages and
which counts its steps, and two layers between which a pair of arrays goes: what is computed, and what is added to it
later. As a model of blocks it trains with every strategy, and in the stages of a pipeline.
"""

# ruff: noqa: D102 - the methods are those of mpizero.nn.Layer

import argparse
from dataclasses import dataclass, field

import numpy as np
from sklearn.datasets import load_digits

import mpizero as mz
from mpizero.types import EVALUATE, Init, IntegerSpec, ParameterSpec

SIDE, EPS, MOMENTUM = 8, 1e-5, 0.1


def windows(x):
    """Return the 3 x 3 neighbours of every pixel of (samples, 8, 8, channels) images as the rows of a matrix."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return np.concatenate([padded[:, i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)], axis=3)


def windows_adjoint(d, channels):
    """Add the derivatives by all neighbours to those by the pixels."""
    padded = np.zeros((len(d), SIDE + 2, SIDE + 2, channels), d.dtype)
    for place in range(9):
        i, j = divmod(place, 3)
        padded[:, i : i + SIDE, j : j + SIDE] += d[..., place * channels : (place + 1) * channels]
    return padded[:, 1:-1, 1:-1]


@dataclass(frozen=True)
class Convolution(mz.nn.Layer):
    """Compute each output channel of a pixel from its 3 x 3 neighbours."""

    inputs: int
    outputs: int

    def own_specs(self):
        return (ParameterSpec("weight", (9 * self.inputs, self.outputs), Init("normal", (4.5 * self.inputs) ** -0.5)),)

    def forward(self, params, x, run=EVALUATE):
        rows = windows(x).reshape(-1, 9 * self.inputs)
        return (rows @ params["weight"]).reshape(*x.shape[:3], self.outputs), rows

    def backward_input(self, params, cache, dy):
        d = dy.reshape(-1, self.outputs)
        return windows_adjoint((d @ params["weight"].T).reshape(*dy.shape[:3], -1), self.inputs), d

    def backward_weights(self, params, cache, pending, grads):
        np.matmul(cache.T, pending, out=grads["weight"])


@dataclass(frozen=True)
class NormAndReLU(mz.nn.Layer):
    """Give each channel mean 0 and variance 1 over a grain, apply weight and bias, and set what is negative to 0."""

    channels: int

    def own_specs(self):
        shape, ones = (self.channels,), Init("ones")
        trained = ParameterSpec("weight", shape, ones, decay=False), ParameterSpec("bias", shape, decay=False)
        return (
            *trained,
            ParameterSpec("mean", shape, averaged=True),
            ParameterSpec("variance", shape, ones, averaged=True),
        )

    def own_integers(self):
        return (IntegerSpec("batches"),)

    def forward(self, params, x, run=EVALUATE):
        axes = (0, 1, 2)
        mean, variance = (x.mean(axes), x.var(axes)) if run.training else (params["mean"], params["variance"])
        unit = (x - mean) / np.sqrt(variance + EPS)
        y = unit * params["weight"] + params["bias"]
        return np.maximum(y, 0), (unit, y > 0, mean, variance)

    def backward_input(self, params, cache, dy):
        unit, passed, _, variance = cache
        axes, d = (0, 1, 2), dy * passed
        sums = (d * unit).sum(axes), d.sum(axes)
        d = d * params["weight"]
        centred = d - d.mean(axes) - unit * (d * unit).mean(axes)
        return centred / np.sqrt(variance + EPS), sums

    def backward_weights(self, params, cache, pending, grads):
        grads["weight"][...], grads["bias"][...] = pending
        for name, seen in zip(("mean", "variance"), cache[2:], strict=True):
            grads[name][...] = (1 - MOMENTUM) * params[name] + MOMENTUM * seen  # the new value, in place of a gradient
        grads["batches"][...] = params["batches"] + 1


@dataclass(frozen=True)
class OfFirst(mz.nn.Layer):
    """Apply a layer to the first array of a pair, and pass the second on."""

    layer: mz.nn.Layer

    def children(self):
        return {"layer": self.layer}

    def forward(self, params, x, run=EVALUATE):
        y, cache = self.layer.forward(params["layer"], x[0], run)
        return (y, x[1]), cache

    def backward_input(self, params, cache, dy):
        d, pending = self.layer.backward_input(params["layer"], cache, dy[0])
        return (d, dy[1]), pending

    def backward_weights(self, params, cache, pending, grads):
        self.layer.backward_weights(params["layer"], cache, pending, grads["layer"])


class Fork(mz.nn.Layer):
    """Return the input twice."""

    def forward(self, params, x, run=EVALUATE):
        return (x, x), None

    def backward_input(self, params, cache, dy):
        return dy[0] + dy[1], None


class Join(mz.nn.Layer):
    """Add the two arrays of a pair, and make a row of each sample."""

    def forward(self, params, x, run=EVALUATE):
        return (x[0] + x[1]).reshape(len(x[0]), -1), x[0].shape

    def backward_input(self, params, cache, dy):
        d = dy.reshape(cache)
        return (d, d), None


@dataclass(frozen=True)
class Network:
    """The layers of the network as a model of blocks."""

    channels: int = 8
    dtype: str = "float64"
    seed: int = 0
    loss: mz.nn.CrossEntropy = field(default_factory=mz.nn.CrossEntropy)

    @property
    def blocks(self):
        wide = self.channels
        return {
            "first": Convolution(1, wide),
            "norm": NormAndReLU(wide),
            "fork": Fork(),
            "second": OfFirst(Convolution(wide, wide)),
            "norm2": OfFirst(NormAndReLU(wide)),
            "join": Join(),
            "head": mz.nn.Linear(SIDE * SIDE * wide, 10),
        }


def make(**settings):
    """Return the model."""
    return Network(**settings)


def data(samples=1797):
    """Return images of digits and what they show."""
    images, shown = load_digits(return_X_y=True)
    return images[:samples].reshape(-1, SIDE, SIDE, 1) / 16, shown[:samples]


def main(steps):
    """Train the network, and print its accuracy on other digits, and the hash of its parameters."""
    x, y = data()
    source = mz.data.ArraySource(x[:1536], y[:1536])
    with mz.distribute(make(), mz.AdamW(1e-2), "zero3", config=mz.Config(micro_batch=16)) as model:
        for batch in mz.data.batches(source, model, global_batch=128, steps=steps):
            model.train(*batch)
        own = np.array_split(np.arange(1536, len(x)), model.world_size)[model.rank]
        accuracy, sha256 = model.evaluate(x[own], y[own]).accuracy, model.parameters_sha256()
        if model.rank == 0:
            print(f"accuracy {accuracy:.3f}, {sha256} on {model.world_size} ranks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
