"""A network of own layers: each block adds a damped oscillation of its input to it, and the last one reads it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.types import EVALUATE, Init, ParameterSpec


@dataclass(frozen=True)
class Oscillation(mz.nn.Layer):
    """Compute ``y = x + sin(x @ weight + phase) * damping``, for x of shape (samples, width)."""

    width: int

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Return the parameters, which have no values yet."""
        return (
            ParameterSpec("weight", (self.width, self.width), Init("normal", self.width**-0.5)),
            ParameterSpec("phase", (self.width,), Init("uniform", 3.0), decay=False),
            ParameterSpec("damping", (self.width,), Init("ones"), decay=False),
        )

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> tuple[Any, Any]:
        """Return the output, and what the backward pass needs."""
        angle = x @ params["weight"] + params["phase"]
        return x + np.sin(angle) * params["damping"], (x, angle)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, and that of the angles for the weights."""
        _, angle = cache
        d_angle = dy * params["damping"] * np.cos(angle)
        return dy + d_angle @ params["weight"].T, (dy, d_angle)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        """Write the gradients of the parameters: sums over the samples."""
        (x, angle), (dy, d_angle) = cache, pending
        np.matmul(x.T, d_angle, out=grads["weight"])
        np.sum(d_angle, axis=0, out=grads["phase"])
        np.sum(dy * np.sin(angle), axis=0, out=grads["damping"])


@dataclass(frozen=True)
class Network:
    """Read ``features`` numbers a sample, and predict ``outputs`` numbers."""

    features: int
    width: int
    depth: int
    outputs: int
    seed: int
    dtype: Any = field(default_factory=lambda: np.dtype("float32"))

    @cached_property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by name, in the order in which they run."""
        inner = {f"oscillation.{i}": Oscillation(self.width) for i in range(self.depth)}
        return {"in": mz.nn.Linear(self.features, self.width), **inner, "out": mz.nn.Linear(self.width, self.outputs)}

    @cached_property
    def loss(self) -> Any:
        """Mean squared error."""
        return mz.nn.MeanSquaredError()


def make(width: int, depth: int, source: Any, seed: int) -> Network:
    """Return the model: ``width`` and ``depth`` are keys of [model]; ``source`` are the samples for training."""
    x, y = source.samples([0])
    return Network(x.shape[1], width, depth, y.shape[1], seed)
