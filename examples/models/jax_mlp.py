"""Define a network of JAX with dropout, for scikit-learn's digits: as one loss, and by blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from mpizero.adapters.jax import JaxModel

WIDTH, HIDDEN = 48, 3


def dense(inputs: int, outputs: int) -> Any:
    """Return a function that makes the parameters of a layer from a random key."""

    def init(key: Any) -> dict[str, Any]:
        kernel = jax.random.normal(key, (inputs, outputs), jnp.float32) * (2 / inputs) ** 0.5
        return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}

    return init


def affine(parameters: Any, x: Any) -> Any:
    """Multiply by the kernel, and add the bias."""
    return x @ parameters["kernel"] + parameters["bias"]


def hidden(parameters: Any, x: Any, key: Any) -> Any:
    """Add what a hidden layer computes to its input; in training, a tenth of the features is dropped."""
    y = x + jax.nn.gelu(affine(parameters, x))
    return y if key is None else jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)


def cross_entropy(scores: Any, y: Any) -> Any:
    """Return the sum of the negative log-likelihoods of the classes ``y``."""
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1))


LAYERS = {
    "in": (dense(64, WIDTH), affine),
    **{f"hidden.{i}": (dense(WIDTH, WIDTH), hidden) for i in range(HIDDEN)},
    "out": (dense(WIDTH, 10), affine),
}


def by_blocks() -> JaxModel:
    """Return the model as a list of blocks."""
    return JaxModel(None, cross_entropy, blocks=LAYERS, seed=1)


def as_function() -> JaxModel:
    """Return the model as one loss of all parameters."""
    keys = jax.random.split(jax.random.key(1), len(LAYERS))
    start = {name: init(key) for key, (name, (init, _)) in zip(keys, LAYERS.items(), strict=True)}

    def scores(parameters: Any, x: Any, key: Any = None) -> Any:
        for number, (name, (_, apply)) in enumerate(LAYERS.items()):
            if apply is hidden:
                x = hidden(parameters[name], x, None if key is None else jax.random.fold_in(key, number))
            else:
                x = apply(parameters[name], x)
        return x

    def loss(parameters: Any, x: Any, y: Any, key: Any) -> Any:
        return cross_entropy(scores(parameters, x, key), y)

    return JaxModel(start, loss, predict=lambda parameters, x: scores(parameters, x), seed=1)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, as rows, and their classes."""
    images, classes = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), classes
