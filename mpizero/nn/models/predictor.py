"""Compile a model's whole forward pass to one kernel, which uses no BLAS and calls no layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero.errors import DataError
from mpizero.nn.arrays import as_ids, as_rows
from mpizero.types import Array, Params


@dataclass(frozen=True)
class GPTPredictor:
    """Compute logits from ids (samples, length) by one kernel call; :func:`compile_gpt` makes the object.

    Attributes
    ----------
    sizes : tuple of int
        The model's dim, layers, heads, vocabulary and sequence.
    scalars : Array
        The eps of the norms, and the factor on attention scores.
    packed : Array
        All parameters, one after the other in one flat array.
    """

    sizes: tuple[int, int, int, int, int]
    scalars: Array
    packed: Array

    def __call__(self, x: Array) -> Array:
        """Return the logits (samples, length, vocabulary) of the ids ``x``."""
        from mpizero.kernels import predict

        dim, layers, heads, vocabulary, sequence = self.sizes
        if x.ndim != 2 or x.shape[1] > sequence:
            raise DataError(f"the predictor: takes ids of shape (samples, length <= {sequence}), not {tuple(x.shape)}")
        ids = as_ids(np.asarray(x), vocabulary, "the predictor")
        length = ids.shape[1]
        out = np.empty((*ids.shape, vocabulary), self.packed.dtype)
        work = np.empty(length * (9 * dim + 1), self.packed.dtype)
        predict.gpt(
            ids.reshape(-1),
            length,
            dim,
            layers,
            heads,
            vocabulary,
            sequence,
            self.scalars,
            self.packed,
            work,
            out.reshape(-1),
        )
        return out


@dataclass(frozen=True)
class MLPPredictor:
    """Compute outputs from ``x`` (samples, features) by one kernel call; :func:`compile_mlp` makes the object.

    Attributes
    ----------
    widths : Array
        Number of input features, of features of each hidden layer, and of outputs.
    activation : str
        Name of the activation.
    unused : tuple of int
        Indices of the input features that are replaced by zeros.
    packed : Array
        All parameters, one after the other in one flat array.
    """

    widths: Array
    activation: str
    unused: tuple[int, ...]
    packed: Array

    def __call__(self, x: Array) -> Array:
        """Return the outputs (samples, outputs) of ``x``."""
        from mpizero.kernels import predict

        rows = as_rows(np.asarray(x), int(self.widths[0]), self.packed.dtype, "the predictor")
        if self.unused:
            rows = rows.copy()
            rows[:, list(self.unused)] = 0
        out = np.empty((*x.shape[:-1], int(self.widths[-1])), self.packed.dtype)
        work = np.empty(2 * len(rows) * int(self.widths.max()), self.packed.dtype)
        kind = predict.ACTIVATIONS.index(self.activation)
        predict.mlp(rows.reshape(-1), len(rows), self.widths, kind, self.packed, work, out.reshape(-1))
        return out


def compile_gpt(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    """Return a :class:`GPTPredictor` with a copy of the parameters, and compile its kernel."""
    arrays = [params["embedding"]["token"]["weight"], params["embedding"]["position"]["weight"]]
    for index in range(model.layers):
        block = params[f"blocks.{index}"]
        attention, feed_forward = block["attention"], block["feed_forward"]
        for part in (
            block["norm1"],
            attention["qkv"],
            attention["projection"],
            block["norm2"],
            feed_forward["expand"],
            feed_forward["projection"],
        ):
            arrays += [part["weight"], part["bias"]]
    head = params["head"]
    # Stored by vocabulary item; the kernel reads weights inputs first, and always adds a bias.
    arrays += [head["norm"]["weight"], head["norm"]["bias"], head["projection"]["weight"].T, np.zeros(model.vocabulary)]
    eps = model.blocks["head"].children()["norm"].eps
    scalars = np.array([eps, (model.dim // model.heads) ** -0.5], model.dtype)
    sizes = (model.dim, model.layers, model.heads, model.vocabulary, model.sequence)
    predictor = GPTPredictor(sizes, scalars, _packed(arrays, model.dtype))
    predictor(np.zeros((1, 1), np.int64))  # compiles now, not at the first prediction
    return predictor


def compile_mlp(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    """Return an :class:`MLPPredictor` with a copy of the parameters, and compile its kernel."""
    layers = [params[block]["linear"] for block in model.blocks]
    packed = _packed([array for layer in layers for array in (layer["weight"], layer["bias"])], model.dtype)
    widths = np.array([model.features, *model.hidden, model.outputs], np.int64)
    unused = tuple(sorted(set(range(model.features)) - set(model.active_feature_indices)))
    predictor = MLPPredictor(widths, model.activation, unused, packed)
    predictor(np.zeros((1, model.features), model.dtype))  # compiles now, not at the first prediction
    return predictor


def _packed(arrays: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    return np.concatenate([np.asarray(array, dtype).reshape(-1) for array in arrays])
