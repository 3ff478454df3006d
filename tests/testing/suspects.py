"""Models for tests of check_model: right ones with everything that could raise a false alarm, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.nn import Layer
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run

Case = tuple[Any, Any, Any]


def dense(rng: Any, dtype: str = "float64", samples: int = 7) -> tuple[Array, Array]:
    x = rng.normal(size=(samples, 4)).astype(dtype)
    return x, (np.sin(x[:, :2]) + x[:, 2:]).astype(dtype)


def start(rng: Any, dtype: str = "float64") -> dict[str, Array]:
    return {
        "a": rng.normal(size=(4, 5)).astype(dtype),
        "b": np.zeros(5, dtype),
        "c": rng.normal(size=(5, 2)).astype(dtype),
    }


def perceptron(activation: str = "tanh") -> Callable[..., Any]:
    """Two layers and the sum of squares, by hand."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        z = x @ p["a"] + p["b"]
        h = np.tanh(z) if activation == "tanh" else np.maximum(z, 0)
        error = h @ p["c"] - y
        dh = 2 * error @ p["c"].T
        dz = dh * (1 - h**2) if activation == "tanh" else dh * (z > 0)
        gradients = {"a": x.T @ dz, "b": dz.sum(axis=0), "c": 2 * h.T @ error}
        return float((error**2).sum()), gradients, float(len(x))

    return loss_and_grad


def predictor(p: Any, x: Any) -> Any:
    return np.tanh(x @ p["a"] + p["b"]) @ p["c"]


def box(rng: Any, change: Callable[..., Any] | None = None, dtype: str = "float64", **settings: Any) -> Case:
    """The perceptron, whose answer ``change(p, batch, loss, gradients, weight)`` may spoil."""
    right = perceptron(settings.pop("activation", "tanh"))

    def loss_and_grad(p: Any, batch: Any) -> Any:
        loss, gradients, weight = right(p, batch)
        return (loss, gradients, weight) if change is None else change(p, batch, loss, gradients, weight)

    return mz.FunctionModel(start(rng, dtype), loss_and_grad, **settings), *dense(rng, dtype)


def writing(rng: Any, write: Callable[[Any, Any], None] | None = None) -> Case:
    """The perceptron, which writes its gradients in place; ``write(gradients, value)`` may spoil that of 'b'."""
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any, gradients: Any) -> Any:
        loss, found, weight = right(p, batch)
        for name, value in found.items():
            if write is None or name != "b":
                gradients[name][...] = value
            else:
                write(gradients, value)
        return loss, weight

    return mz.FunctionModel(start(rng), loss_and_grad, in_place=True), *dense(rng)


def added(gradients: Any, value: Any) -> None:
    gradients["b"] += value


def half_written(gradients: Any, value: Any) -> None:
    gradients["b"][:3] = value[:3]


def bound(gradients: Any, value: Any) -> None:
    gradients["b"] = value


# ------------------------------------------------------------------ right ones


def gpt(rng: Any, **changes: Any) -> Case:
    settings = {"dim": 8, "layers": 1, "heads": 2, "sequence": 6, "vocabulary": 23, "seed": int(rng.integers(99))}
    tokens = rng.integers(0, 23, (5, 6))
    return mz.nn.GPT(**{**settings, **changes}), tokens, np.where(rng.random((5, 6)) < 0.2, -1, tokens)


def relu_network(rng: Any) -> Case:
    model = mz.nn.MLP(4, [16, 16], 3, activation="relu", seed=int(rng.integers(99)))
    return model, rng.normal(size=(9, 4)).astype("f4"), rng.integers(0, 3, 9)


def unused_rows(rng: Any) -> Case:
    """A table of 50 rows, of which a few are looked up."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        error = p["table"][x].sum(axis=1) - y
        gradient = np.zeros_like(p["table"])
        np.add.at(gradient, x, 2 * error[:, None, :])
        return float((error**2).sum()), {"table": gradient}, float(len(x))

    model = mz.FunctionModel({"table": rng.normal(size=(50, 3))}, loss_and_grad)
    return model, rng.integers(0, 50, (6, 2)), rng.normal(size=(6, 3))


def frozen(rng: Any) -> Case:
    def without(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        return loss, {name: g for name, g in gradients.items() if name != "a"}, weight

    return box(rng, without, frozen=["a"])


def weighted(rng: Any) -> Case:
    """Each sample has a weight in the last column of y, one of them zero."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        error, w = x @ p["w"] - y[:, 0], y[:, 1]
        return float((w * error**2).sum()), {"w": 2 * x.T @ (w * error)}, float(w.sum())

    y = np.stack([rng.normal(size=8), rng.random(8)], axis=1)
    y[0, 1] = 0
    return mz.FunctionModel({"w": np.zeros(4)}, loss_and_grad), rng.normal(size=(8, 4)), y


def absolute(rng: Any) -> Case:
    """Kinks everywhere: absolute errors of a maximum."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        z = x @ p["w"]
        best = z.argmax(axis=1)
        error = z[np.arange(len(x)), best] - y
        gradient = np.zeros_like(p["w"])
        np.add.at(gradient.T, best, np.sign(error)[:, None] * x)
        return float(np.abs(error).sum()), {"w": gradient}, float(len(x))

    return mz.FunctionModel({"w": rng.normal(size=(4, 3))}, loss_and_grad), rng.normal(size=(6, 4)), rng.normal(size=6)


def physics(rng: Any) -> Case:
    """Parameters of very different size, some of which must stay positive: -log of a decay's likelihood."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
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

    def shaped(p: Any, batch: Any) -> Any:
        loss, gradients, weight = loss_and_grad(p, batch)
        return loss, {name: np.asarray(g) for name, g in gradients.items()}, weight

    model = mz.FunctionModel({"rate": np.array(1e-3), "shift": np.array(2e6)}, shaped)
    return model, rng.exponential(1e3, 9), np.zeros(9)


def single_inside(rng: Any) -> Case:
    """float64 parameters for code that computes in float32."""
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        loss, gradients, weight = right({n: v.astype("f4") for n, v in p.items()}, tuple(v.astype("f4") for v in batch))
        return loss, gradients, weight

    return mz.FunctionModel(start(rng), loss_and_grad), *dense(rng)


def keyed_dropout(rng: Any) -> Case:
    """Masks by sample, as the function is told which it is given."""
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any, *, run: Run) -> Any:
        x, y = batch
        masks = [np.random.default_rng((run.seed, run.step, sample)).random(4) < 0.7 for sample in run.samples]
        return right(p, (x * np.array(masks), y))

    return mz.FunctionModel(start(rng), loss_and_grad, seed=int(rng.integers(99))), *dense(rng)


def penalty(rng: Any) -> Case:
    def with_penalty(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        changed = {name: g + 2e-2 * weight * p[name] for name, g in gradients.items()}
        return loss + 1e-2 * weight * sum((v**2).sum() for v in p.values()), changed, weight

    return box(rng, with_penalty)


def steep_gradient(rng: Any) -> Case:
    """A loss of many terms that cancel, in float32, far from its minimum."""
    model, x, y = box(rng, dtype="float32")
    return model, x * 30, y - 1000


def sequence_free(rng: Any) -> Case:
    return gpt(rng, dropout=0.3, tied=True, dtype="float64")


RIGHT: dict[str, Callable[[Any], Case]] = {
    "perceptron": lambda rng: box(rng, predict=predictor),
    "perceptron in place": writing,
    "perceptron in float32": lambda rng: box(rng, dtype="float32", predict=predictor),
    "ReLU by hand in float32": lambda rng: box(rng, dtype="float32", activation="relu"),
    "ReLU network of layers": relu_network,
    "GPT in float32 with dropout": lambda rng: gpt(rng, dropout=0.2),
    "tied GPT with dropout": sequence_free,
    "unused rows of a table": unused_rows,
    "frozen parameters": frozen,
    "weighted samples": weighted,
    "absolute errors of a maximum": absolute,
    "positive parameters of any size": physics,
    "float32 inside": single_inside,
    "penalty by weight": penalty,
    "dropout by hand keyed by sample": keyed_dropout,
    "far from the minimum in float32": steep_gradient,
}

# ------------------------------------------------------------------ wrong ones


def mean_returned(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss / weight, {name: g / weight for name, g in gradients.items()}, weight


def gradient_of_the_mean(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {name: g / weight for name, g in gradients.items()}, weight


def factor_of_two(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {**gradients, "b": gradients["b"] / 2}, weight


def forgotten_zeros(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {**gradients, "b": np.zeros(5)}, weight


def one_row_wrong(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    wrong = gradients["a"].copy()
    wrong[3, 1] *= 1.5
    return loss, {**gradients, "a": wrong}, weight


def wrong_sign(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {name: -g for name, g in gradients.items()}, weight


def constant_weight(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, gradients, 1.0


def constant_penalty(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    changed = {name: g + 0.2 * p[name] for name, g in gradients.items()}
    return loss + 0.1 * sum((v**2).sum() for v in p.values()), changed, weight


def penalty_without_gradient(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss + weight * (p["c"] ** 2).sum(), gradients, weight


def noise(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss + np.random.normal(), gradients, weight  # noqa: NPY002


def unknown_name(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {**gradients, "bb": gradients["b"]}, weight


def missing_name(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {"a": gradients["a"], "c": gradients["c"]}, weight


def complex_gradient(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {**gradients, "b": gradients["b"] + 0j}, weight


def integer_gradient(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, {**gradients, "b": gradients["b"].astype(int)}, weight


def text(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return str(loss), gradients, weight


def unsummed(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return np.full(len(batch[0]), loss), gradients, weight


def in_place(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    batch[0][...] -= batch[0].mean(axis=0)
    return loss, gradients, weight


def by_pointer(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    import ctypes

    ctypes.cast(p["b"].ctypes.data, ctypes.POINTER(ctypes.c_double))[0] = 7.0
    return loss, gradients, weight


def negative_weight(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
    return loss, gradients, -weight


def counter(rng: Any) -> Case:
    calls: list[int] = []

    def warmed(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        calls.append(1)
        factor = min(1.0, len(calls) / 3)
        return factor * loss, {name: factor * g for name, g in gradients.items()}, weight

    return box(rng, warmed)


def cache_by_identity(rng: Any) -> Case:
    kept: dict[int, Any] = {}

    def cached(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        return kept.setdefault(p["a"].ctypes.data, (loss, gradients, weight))

    return box(rng, cached)


def running_mean(rng: Any) -> Case:
    kept = [0.0, 0.0]

    def centred(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        if kept[1] != p["a"].sum():
            kept[:] = kept[1], p["a"].sum()
        return loss + 0.1 * kept[0], gradients, weight

    return box(rng, centred)


def singular(rng: Any) -> Case:
    def rooted(p: Any, batch: Any, loss: float, gradients: Any, weight: float) -> Any:
        gradients["b"] = gradients["b"] + 0.5 / np.sqrt(np.abs(p["b"]))
        return loss + np.sqrt(np.abs(p["b"])).sum(), gradients, weight

    return box(rng, rooted)


def batch_norm(rng: Any) -> Case:
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        return right(p, ((x - x.mean(axis=0)) / (x.std(axis=0) + 1), y))

    return mz.FunctionModel(start(rng), loss_and_grad), *dense(rng)


def dropout_by_place(rng: Any) -> Case:
    """Masks by the place in the batch, which is another in another cut."""
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any, *, run: Run) -> Any:
        x, y = batch
        return right(p, (x * (np.random.default_rng((run.seed, run.step)).random(x.shape) < 0.7), y))

    return mz.FunctionModel(start(rng), loss_and_grad), *dense(rng)


def built_in_number(rng: Any) -> Case:
    right = perceptron()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        return right(p, (x.reshape(7, 4), y))

    return mz.FunctionModel(start(rng), loss_and_grad), *dense(rng)


def exchanged(rng: Any) -> Case:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        error = x @ (p["u"] * np.tanh(p["v"])) - y
        g = 2 * x.T @ error
        right = {"u": g * np.tanh(p["v"]), "v": g * p["u"] / np.cosh(p["v"]) ** 2}
        return float((error**2).sum()), {"u": right["v"], "v": right["u"]}, float(len(x))

    model = mz.FunctionModel({"u": rng.normal(size=4), "v": rng.normal(size=4)}, loss_and_grad)
    return model, rng.normal(size=(6, 4)), rng.normal(size=6)


def transposed(rng: Any) -> Case:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        error = x @ p["w"] - y
        return float((error**2).sum()), {"w": 2 * error.T @ x}, float(len(x))

    model = mz.FunctionModel({"w": rng.normal(size=(4, 4))}, loss_and_grad)
    return model, rng.normal(size=(6, 4)), rng.normal(size=(6, 4))


def noisy_prediction(rng: Any) -> Case:
    return box(rng, predict=lambda p, x: predictor(p, x) + np.random.normal())  # noqa: NPY002


def centred_prediction(rng: Any) -> Case:
    return box(rng, predict=lambda p, x: predictor(p, x - x.mean(axis=0)))


@dataclass(frozen=True)
class Scale(Layer):
    """x * weight + bias, with a mistake."""

    features: int
    mistake: str = ""

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        return (
            ParameterSpec("weight", (self.features,), Init("ones")),
            ParameterSpec("bias", (self.features,), Init("zeros"), decay=False),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        return x * params["weight"] + params["bias"], x

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        return dy if self.mistake == "input gradient" else dy * params["weight"], dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Any) -> None:
        gradient = (cache * pending).sum(axis=0)
        if self.mistake == "rebinds":
            grads["weight"] = gradient
        elif self.mistake == "adds":
            grads["weight"][...] += gradient
        else:
            grads["weight"][...] = gradient
        grads["bias"][...] = pending.sum(axis=0)

    def backward(self, params: Params, cache: Any, dy: Array, grads: Any) -> Array | None:
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
    def blocks(self) -> dict[str, Layer]:
        return {"in": mz.nn.Linear(4, 5), "scale": Scale(5, self.mistake), "out": mz.nn.Linear(5, 2)}


class UnscaledLoss(mz.nn.MeanSquaredError):
    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        return super().backward(cache)


def chain(mistake: str, **changes: Any) -> Callable[[Any], Case]:
    return lambda rng: (Chain(mistake, seed=int(rng.integers(99)), **changes), *dense(rng, "float32"))


def spoilt(change: Callable[..., Any]) -> Callable[[Any], Case]:
    return lambda rng: box(rng, change)


#: What is wrong: the model, what the error must name, and pieces of the probable cause.
WRONG: dict[str, tuple[Callable[[Any], Case], str, str]] = {
    "added in place": (
        lambda rng: writing(rng, added),
        "gradient of 'b': has 5 of 5 elements",
        "gradients[name] += value",
    ),
    "half written": (lambda rng: writing(rng, half_written), "gradient of 'b': has 2 of 5 elements", "left out"),
    "bound in place": (lambda rng: writing(rng, bound), "gradients: are bound at suspects.py", "to a name"),
    "a mean in place of a sum": (spoilt(mean_returned), "loss", "a mean over the samples"),
    "the gradient of the mean": (spoilt(gradient_of_the_mean), "gradient of 'a'", "a mean over the samples"),
    "half of a gradient": (spoilt(factor_of_two), "gradient of 'b'", "0.5 times what it must be"),
    "zeros in place of a gradient": (spoilt(forgotten_zeros), "gradient of 'b'", "not computed"),
    "one wrong element": (spoilt(one_row_wrong), "gradient of 'a'", "around element [3, 1]"),
    "the wrong sign": (spoilt(wrong_sign), "gradients of all 3 parameters", "its sign"),
    "a weight of 1": (spoilt(constant_weight), "weight", "does not grow with the batch"),
    "a penalty once a call": (spoilt(constant_penalty), "loss", "once a call"),
    "a penalty without its gradient": (spoilt(penalty_without_gradient), "gradient of 'c'", "a part of it"),
    "noise": (spoilt(noise), "loss", "the global generator numpy.random"),
    "an unknown name": (spoilt(unknown_name), "gradient of 'bb'", "use the names of the parameters, 'a', 'b', 'c'"),
    "a missing name": (spoilt(missing_name), "gradient of 'b'", "is missing"),
    "a complex gradient": (spoilt(complex_gradient), "gradient of 'b'", "complex128"),
    "an integer gradient": (spoilt(integer_gradient), "gradient of 'b'", "int64"),
    "a loss as text": (spoilt(text), "loss", "one real number"),
    "losses that are not summed": (spoilt(unsummed), "loss", "of shape (7,)"),
    "a negative weight": (spoilt(negative_weight), "weight", "is -7"),
    "samples changed in place": (spoilt(in_place), "arguments", "works in place"),
    "parameters changed by pointer": (spoilt(by_pointer), "parameter 'b'", "bare pointer"),
    "a warm-up that counts calls": (counter, "loss", "a counter"),
    "a cache by identity": (cache_by_identity, "loss", "cache that goes by the identity"),
    "a running mean": (running_mean, "loss", "running mean"),
    "an infinite gradient": (singular, "gradient of 'b'", "5 elements of 5 that are not finite"),
    "statistics of the batch": (batch_norm, "loss", "statistics of the batch"),
    "dropout keyed by the place": (dropout_by_place, "loss", "random numbers not keyed by run.samples"),
    "a built-in number of samples": (built_in_number, "a piece of the batch", "built in"),
    "exchanged gradients": (exchanged, "gradient of 'u'", "the gradient of 'v' under this name"),
    "a transposed gradient": (transposed, "gradient of 'w'", "its transpose"),
    "noise in the prediction": (noisy_prediction, "prediction", "dropout or noise"),
    "a prediction that sees its neighbours": (centred_prediction, "prediction", "statistics of the batch"),
    "a layer that rebinds": (chain("rebinds"), "gradient of 'scale.weight'", "which binds a name"),
    "a layer that adds": (chain("adds"), "gradient of 'scale.weight'", "+="),
    "a layer without its part in the chain rule": (chain("input gradient"), "gradient of 'in.weight'", "a part of it"),
    "halves that are not the whole": (chain("halves"), "gradient of 'scale.bias'", "halves"),
    "a loss without its scale": (chain("", loss=UnscaledLoss()), "gradient of", "without the scale"),
}
