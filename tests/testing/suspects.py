"""Models for tests of check_model: right ones with everything that could raise a false alarm, and wrong ones."""

from __future__ import annotations

import ctypes
import itertools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import mpizero as mz
from mpizero.nn import Layer
from mpizero.types import EVALUATE, Init, ParameterSpec


def dense(rng, dtype="float64", samples=7):
    x = rng.normal(size=(samples, 4)).astype(dtype)
    return x, (np.sin(x[:, :2]) + x[:, 2:]).astype(dtype)


def start(rng, dtype="float64"):
    return {
        "a": rng.normal(size=(4, 5)).astype(dtype),
        "b": np.zeros(5, dtype),
        "c": rng.normal(size=(5, 2)).astype(dtype),
    }


def perceptron(activation="tanh"):
    """Two layers and the sum of squares, by hand."""

    def loss_and_grad(p, batch):
        x, y = batch
        z = x @ p["a"] + p["b"]
        h = np.tanh(z) if activation == "tanh" else np.maximum(z, 0)
        error = h @ p["c"] - y
        dh = 2 * error @ p["c"].T
        dz = dh * (1 - h**2) if activation == "tanh" else dh * (z > 0)
        gradients = {"a": x.T @ dz, "b": dz.sum(axis=0), "c": 2 * h.T @ error}
        return float((error**2).sum()), gradients, float(len(x))

    return loss_and_grad


def predictor(p, x):
    return np.tanh(x @ p["a"] + p["b"]) @ p["c"]


class Answer(NamedTuple):
    """What the perceptron answers, and what it was asked."""

    p: Any
    batch: Any
    loss: Any
    gradients: Any
    weight: Any

    def scaled(self, factor):
        return self._replace(gradients={name: factor * g for name, g in self.gradients.items()})

    def penalized(self, factor):
        """Return the answer with ``factor`` times the sum of all squares of parameters, and its gradient."""
        gradients = {name: g + 2 * factor * self.p[name] for name, g in self.gradients.items()}
        return self._replace(loss=self.loss + factor * sum((v**2).sum() for v in self.p.values()), gradients=gradients)


def box(rng, change=lambda answer: answer, dtype="float64", activation="tanh", **settings):
    """The perceptron, whose answer ``change(answer)`` may spoil."""
    right = perceptron(activation)

    def loss_and_grad(p, batch):
        return change(Answer(p, batch, *right(p, batch)))[2:]

    return mz.FunctionModel(start(rng, dtype), loss_and_grad, **settings), *dense(rng, dtype)


def answering(change, **settings):
    """Cases of the perceptron whose answer is changed."""
    return lambda rng: box(rng, change, **settings)


def of_gradient(name, change):
    """Cases of the perceptron of which one gradient is changed."""
    return answering(lambda a: a._replace(gradients={**a.gradients, name: change(a.gradients[name])}))


def asking(change):
    """Cases of the perceptron which is asked for ``change(parameters, x, y)``."""
    right = perceptron()

    def loss_and_grad(p, batch):
        p, *batch = change(p, *batch)
        return right(p, batch)

    return lambda rng: (mz.FunctionModel(start(rng), loss_and_grad), *dense(rng))


def dropping(keys, **settings):
    """Cases of the perceptron with dropout of its samples by the keys that ``keys(run, x)`` gives."""
    right = perceptron()

    def loss_and_grad(p, batch, *, run):
        x, y = batch
        masks = [np.random.default_rng((run.seed, run.step, key)).random(4) < 0.7 for key in keys(run, x)]
        return right(p, (x * np.array(masks), y))

    return lambda rng: (mz.FunctionModel(start(rng), loss_and_grad, **settings), *dense(rng))


def writing(rng, write=None):
    """The perceptron, which writes its gradients in place; ``write(gradients, value)`` may spoil that of 'b'."""
    right = perceptron()

    def loss_and_grad(p, batch, gradients):
        loss, found, weight = right(p, batch)
        for name, value in found.items():
            if write is None or name != "b":
                gradients[name][...] = value
            else:
                write(gradients, value)
        return loss, weight

    return mz.FunctionModel(start(rng), loss_and_grad, in_place=True), *dense(rng)


# ------------------------------------------------------------------ right ones


def gpt(rng, **changes):
    settings = {"dim": 8, "layers": 1, "heads": 2, "sequence": 6, "vocabulary": 23, "seed": int(rng.integers(99))}
    tokens = rng.integers(0, 23, (5, 6))
    return mz.nn.GPT(**{**settings, **changes}), tokens, np.where(rng.random((5, 6)) < 0.2, -1, tokens)


def unused_rows(rng):
    """A table of 50 rows, of which a few are looked up."""

    def loss_and_grad(p, batch):
        x, y = batch
        error = p["table"][x].sum(axis=1) - y
        gradient = np.zeros_like(p["table"])
        np.add.at(gradient, x, 2 * error[:, None, :])
        return float((error**2).sum()), {"table": gradient}, float(len(x))

    model = mz.FunctionModel({"table": rng.normal(size=(50, 3))}, loss_and_grad)
    return model, rng.integers(0, 50, (6, 2)), rng.normal(size=(6, 3))


def relu_network(rng):
    model = mz.nn.MLP(4, [16, 16], 3, activation="relu", seed=int(rng.integers(99)))
    return model, rng.normal(size=(9, 4)).astype("f4"), rng.integers(0, 3, 9)


def weighted(rng):
    """Each sample has a weight in the last column of y, one of them zero."""

    def loss_and_grad(p, batch):
        x, y = batch
        error, w = x @ p["w"] - y[:, 0], y[:, 1]
        return float((w * error**2).sum()), {"w": 2 * x.T @ (w * error)}, float(w.sum())

    y = np.stack([rng.normal(size=8), rng.random(8)], axis=1)
    y[0, 1] = 0
    return mz.FunctionModel({"w": np.zeros(4)}, loss_and_grad), rng.normal(size=(8, 4)), y


def absolute(rng):
    """Kinks everywhere: absolute errors of a maximum."""

    def loss_and_grad(p, batch):
        x, y = batch
        z = x @ p["w"]
        best = z.argmax(axis=1)
        error = z[np.arange(len(x)), best] - y
        gradient = np.zeros_like(p["w"])
        np.add.at(gradient.T, best, np.sign(error)[:, None] * x)
        return float(np.abs(error).sum()), {"w": gradient}, float(len(x))

    return mz.FunctionModel({"w": rng.normal(size=(4, 3))}, loss_and_grad), rng.normal(size=(6, 4)), rng.normal(size=6)


def physics(rng):
    """Parameters of very different size, some of which must stay positive: -log of a decay's likelihood."""

    def loss_and_grad(p, batch):
        t, _ = batch
        rate, shift = p["rate"], p["shift"]
        if rate <= 0:
            raise ValueError("the rate must be positive")
        arg = rate * (t - shift / 1e6)
        loss = (arg - np.log(rate)).sum()
        return (
            float(loss),
            {"rate": (t - shift / 1e6).sum() - len(t) / rate, "shift": -rate * len(t) / 1e6},
            float(len(t)),
        )

    def shaped(p, batch):
        loss, gradients, weight = loss_and_grad(p, batch)
        return loss, {name: np.asarray(g) for name, g in gradients.items()}, weight

    model = mz.FunctionModel({"rate": np.array(1e-3), "shift": np.array(2e6)}, shaped)
    return model, rng.exponential(1e3, 9), np.zeros(9)


def far_from_the_minimum(rng):
    """A loss of many terms that cancel, in float32."""
    model, x, y = box(rng, dtype="float32")
    return model, x * 30, y - 1000


RIGHT = {
    "perceptron": lambda rng: box(rng, predict=predictor),
    "perceptron in place": writing,
    "perceptron in float32": lambda rng: box(rng, dtype="float32", predict=predictor),
    "ReLU by hand in float32": lambda rng: box(rng, dtype="float32", activation="relu"),
    "ReLU network of layers": relu_network,
    "GPT in float32 with dropout": lambda rng: gpt(rng, dropout=0.2),
    "tied GPT with dropout": lambda rng: gpt(rng, dropout=0.3, tied=True, dtype="float64"),
    "unused rows of a table": unused_rows,
    "frozen parameters": answering(
        lambda a: a._replace(gradients={name: a.gradients[name] for name in "bc"}), frozen=["a"]
    ),
    "weighted samples": weighted,
    "absolute errors of a maximum": absolute,
    "positive parameters of any size": physics,
    "float32 inside": asking(
        lambda p, x, y: ({n: v.astype("f4") for n, v in p.items()}, x.astype("f4"), y.astype("f4"))
    ),
    "penalty by weight": answering(lambda a: a.penalized(1e-2 * a.weight)),
    "dropout by hand keyed by sample": dropping(lambda run, x: run.samples, seed=7),
    "far from the minimum in float32": far_from_the_minimum,
}

# ------------------------------------------------------------------ wrong ones


def spoil_element(gradient):
    gradient = gradient.copy()
    gradient[3, 1] *= 1.5
    return gradient


def in_place(a):
    a.batch[0][...] -= a.batch[0].mean(axis=0)
    return a


def by_pointer(a):
    ctypes.cast(a.p["b"].ctypes.data, ctypes.POINTER(ctypes.c_double))[0] = 7.0
    return a


def counting(rng):
    calls = itertools.count(1)

    def warmed(a):
        factor = min(1.0, next(calls) / 3)
        return a.scaled(factor)._replace(loss=factor * a.loss)

    return box(rng, warmed)


def cache_by_identity(rng):
    kept = {}
    return box(rng, lambda a: kept.setdefault(a.p["a"].ctypes.data, a))


def running_mean(rng):
    kept = [0.0, 0.0]

    def centred(a):
        if kept[1] != a.p["a"].sum():
            kept[:] = kept[1], a.p["a"].sum()
        return a._replace(loss=a.loss + 0.1 * kept[0])

    return box(rng, centred)


def rooted(a):
    slope = 0.5 / np.sqrt(np.abs(a.p["b"]))
    gradients = {**a.gradients, "b": a.gradients["b"] + slope}
    return a._replace(loss=a.loss + np.sqrt(np.abs(a.p["b"])).sum(), gradients=gradients)


def exchanged(rng):
    def loss_and_grad(p, batch):
        x, y = batch
        error = x @ (p["u"] * np.tanh(p["v"])) - y
        g = 2 * x.T @ error
        right = {"u": g * np.tanh(p["v"]), "v": g * p["u"] / np.cosh(p["v"]) ** 2}
        return float((error**2).sum()), {"u": right["v"], "v": right["u"]}, float(len(x))

    model = mz.FunctionModel({"u": rng.normal(size=4), "v": rng.normal(size=4)}, loss_and_grad)
    return model, rng.normal(size=(6, 4)), rng.normal(size=6)


def transposed(rng):
    def loss_and_grad(p, batch):
        x, y = batch
        error = x @ p["w"] - y
        return float((error**2).sum()), {"w": 2 * error.T @ x}, float(len(x))

    model = mz.FunctionModel({"w": rng.normal(size=(4, 4))}, loss_and_grad)
    return model, rng.normal(size=(6, 4)), rng.normal(size=(6, 4))


@dataclass(frozen=True)
class Scale(Layer):
    """x * weight + bias, with a mistake."""

    features: int
    mistake: str = ""

    def own_specs(self):
        return (
            ParameterSpec("weight", (self.features,), Init("ones")),
            ParameterSpec("bias", (self.features,), Init("zeros"), decay=False),
        )

    def forward(self, params, x, run=EVALUATE):
        return x * params["weight"] + params["bias"], x

    def backward_input(self, params, cache, dy):
        return dy if self.mistake == "input gradient" else dy * params["weight"], dy

    def backward_weights(self, params, cache, pending, grads):
        gradient = (cache * pending).sum(axis=0)
        if self.mistake == "rebinds":
            grads["weight"] = gradient
        elif self.mistake == "adds":
            grads["weight"][...] += gradient
        else:
            grads["weight"][...] = gradient
        grads["bias"][...] = pending.sum(axis=0)

    def backward(self, params, cache, dy, grads):
        dx = super().backward(params, cache, dy, grads)
        if self.mistake == "halves":
            grads["bias"][...] *= 2
        return dx


@dataclass(frozen=True)
class Chain:
    """Linear, Scale, Linear."""

    mistake: str = ""
    loss: Any = mz.nn.MeanSquaredError()
    dtype: Any = np.dtype("f4")
    seed: int = 0

    @property
    def blocks(self):
        return {"in": mz.nn.Linear(4, 5), "scale": Scale(5, self.mistake), "out": mz.nn.Linear(5, 2)}


class UnscaledLoss(mz.nn.MeanSquaredError):
    def backward(self, cache, scale=1.0):
        return super().backward(cache)


def chain(mistake, **changes):
    return lambda rng: (Chain(mistake, seed=int(rng.integers(99)), **changes), *dense(rng, "float32"))


def written(write):
    return lambda rng: writing(rng, write)


#: What is wrong: the model, what the error must name, and pieces of the probable cause.
WRONG = {
    "added in place": (
        written(lambda gradients, value: operator.iadd(gradients["b"], value)),
        "gradient of 'b': has 5 of 5 elements",
        "gradients[name] += value",
    ),
    "half written": (
        written(lambda gradients, value: np.copyto(gradients["b"][:3], value[:3])),
        "gradient of 'b': has 2 of 5 elements",
        "left out",
    ),
    "bound in place": (
        written(lambda gradients, value: operator.setitem(gradients, "b", value)),
        "gradients: are bound at suspects.py",
        "to a name",
    ),
    "a mean in place of a sum": (
        answering(lambda a: a.scaled(1 / a.weight)._replace(loss=a.loss / a.weight)),
        "loss",
        "a mean over the samples",
    ),
    "the gradient of the mean": (
        answering(lambda a: a.scaled(1 / a.weight)),
        "gradient of 'a'",
        "a mean over the samples",
    ),
    "half of a gradient": (of_gradient("b", lambda g: g / 2), "gradient of 'b'", "0.5 times what it must be"),
    "zeros in place of a gradient": (of_gradient("b", np.zeros_like), "gradient of 'b'", "not computed"),
    "one wrong element": (of_gradient("a", spoil_element), "gradient of 'a'", "around element [3, 1]"),
    "the wrong sign": (answering(lambda a: a.scaled(-1)), "gradients of all 3 parameters", "its sign"),
    "a weight of 1": (answering(lambda a: a._replace(weight=1.0)), "weight", "does not grow with the batch"),
    "a penalty once a call": (answering(lambda a: a.penalized(0.1)), "loss", "once a call"),
    "a penalty without its gradient": (
        answering(lambda a: a._replace(loss=a.loss + a.weight * (a.p["c"] ** 2).sum())),
        "gradient of 'c'",
        "a part of it",
    ),
    "noise": (
        answering(lambda a: a._replace(loss=a.loss + np.random.normal())),  # noqa: NPY002
        "loss",
        "the global generator numpy.random",
    ),
    "an unknown name": (
        answering(lambda a: a._replace(gradients={**a.gradients, "bb": a.gradients["b"]})),
        "gradient of 'bb'",
        "use the names of the parameters, 'a', 'b', 'c'",
    ),
    "a missing name": (
        answering(lambda a: a._replace(gradients={name: a.gradients[name] for name in "ac"})),
        "gradient of 'b'",
        "is missing",
    ),
    "a complex gradient": (of_gradient("b", lambda g: g + 0j), "gradient of 'b'", "complex128"),
    "an integer gradient": (of_gradient("b", lambda g: g.astype(int)), "gradient of 'b'", "int64"),
    "a loss as text": (answering(lambda a: a._replace(loss=str(a.loss))), "loss", "one real number"),
    "losses that are not summed": (
        answering(lambda a: a._replace(loss=np.full(len(a.batch[0]), a.loss))),
        "loss",
        "of shape (7,)",
    ),
    "a negative weight": (answering(lambda a: a._replace(weight=-a.weight)), "weight", "is -7"),
    "samples changed in place": (answering(in_place), "arguments", "works in place"),
    "parameters changed by pointer": (answering(by_pointer), "parameter 'b'", "bare pointer"),
    "a warm-up that counts calls": (counting, "loss", "a counter"),
    "a cache by identity": (cache_by_identity, "loss", "cache that goes by the identity"),
    "a running mean": (running_mean, "loss", "running mean"),
    "an infinite gradient": (answering(rooted), "gradient of 'b'", "5 elements of 5 that are not finite"),
    "statistics of the batch": (
        asking(lambda p, x, y: (p, (x - x.mean(axis=0)) / (x.std(axis=0) + 1), y)),
        "loss",
        "statistics of the batch",
    ),
    "dropout keyed by the place": (
        dropping(lambda run, x: range(len(x))),
        "loss",
        "random numbers not keyed by run.samples",
    ),
    "a built-in number of samples": (
        asking(lambda p, x, y: (p, x.reshape(7, 4), y)),
        "a piece of the batch",
        "built in",
    ),
    "exchanged gradients": (exchanged, "gradient of 'u'", "the gradient of 'v' under this name"),
    "a transposed gradient": (transposed, "gradient of 'w'", "its transpose"),
    "noise in the prediction": (
        lambda rng: box(rng, predict=lambda p, x: predictor(p, x) + np.random.normal()),  # noqa: NPY002
        "prediction",
        "dropout or noise",
    ),
    "a prediction that sees its neighbours": (
        lambda rng: box(rng, predict=lambda p, x: predictor(p, x - x.mean(axis=0))),
        "prediction",
        "statistics of the batch",
    ),
    "a layer that rebinds": (chain("rebinds"), "gradient of 'scale.weight'", "which binds a name"),
    "a layer that adds": (chain("adds"), "gradient of 'scale.weight'", "+="),
    "a layer without its part in the chain rule": (chain("input gradient"), "gradient of 'in.weight'", "a part of it"),
    "halves that are not the whole": (chain("halves"), "gradient of 'scale.bias'", "halves"),
    "a loss without its scale": (chain("", loss=UnscaledLoss()), "gradient of", "without the scale"),
}
