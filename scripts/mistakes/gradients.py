"""Make mistakes in gradients, losses, weights and layers that users write, and with numbers that are not finite."""

# ruff: noqa: D101, D102 - layers and sources as users write them

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import case
import numpy as np

import mpizero as mz
from mpizero.types import Init, ParameterSpec


class Blocks:
    """A user's model of blocks, one for each of ``layers``."""

    def __init__(self, *layers: Any, loss: Any = None) -> None:
        self.blocks = {f"block{number}": layer for number, layer in enumerate(layers)}
        self.loss = loss or mz.nn.MeanSquaredError()
        self.dtype, self.seed = np.dtype(np.float32), 0


@dataclass(frozen=True)
class Gain(mz.nn.Layer):
    """A user's layer: y = gain * x."""

    def own_specs(self) -> Any:
        return (ParameterSpec("gain", (4,), Init("ones")),)

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        return x * params["gain"], x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy * params["gain"], dy


class Rebinds(Gain):
    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        grads["gain"] = (cache * pending).sum(0)


class Adds(Gain):
    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        grads["gain"] += (cache * pending).sum(0)


@dataclass(frozen=True)
class Table(mz.nn.Layer):
    """A user's embedding, which writes the gradient only of the rows that a batch uses."""

    def own_specs(self) -> Any:
        return (ParameterSpec("rows", (9, 4), Init("normal", 0.1)),)

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        return params["rows"][x], x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return None, dy

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        for place, row in enumerate(cache):
            grads["rows"][row] = pending[place]


def train(wrapped: Any, *, x: Any = None, steps: int = 1, strategy: str = "zero2", **settings: Any) -> None:
    """Train ``wrapped`` on this rank's samples, and print the last loss; no mistake may get that far."""
    samples, y = case.samples()
    config = case.config(micro_batch=2, **settings)
    with config, mz.distribute(wrapped, mz.SGD(lr=0.1), strategy=strategy, config=config) as model:
        for _ in range(steps):
            loss = model.train(samples if x is None else x, y)
    print("loss", loss)


def function(**changes: Any) -> Any:
    """Return a linear model; on the last rank, ``changes[name]`` changes its "loss", "grads" or "weight"."""

    def loss_and_grad(parameters: Any, batch: Any) -> Any:
        loss, grads, weight = case.squares(parameters, batch)
        answer = {"loss": loss, "grads": grads, "weight": weight}
        if case.rank() == case.world().Get_size() - 1:
            answer |= {name: change(answer[name]) for name, change in changes.items()}
        return answer["loss"], answer["grads"], answer["weight"]

    return mz.FunctionModel(case.parameters(), loss_and_grad)


@case.mistake("LayoutError", "grads['gain'][...] = value", status=70)
def a_gradient_bound_to_another_array():
    """Write grads["gain"] = value in a layer instead of grads["gain"][...] = value."""
    train(Blocks(Rebinds(), mz.nn.Linear(4, 2)))


@case.mistake("LayoutError", "block 'block0', Gain", "'gain'", "Gain defines no backward_weights", status=70)
def a_layer_without_a_gradient():
    """Write a layer with parameters without backward_weights."""
    train(Blocks(Gain(), mz.nn.Linear(4, 2)), strategy="zero3")


@case.mistake("LayoutError", "block 'block0', Adds", "'gain'", "overwrites", "gradients.py:", status=70)
def a_gradient_that_is_added_to():
    """Write grads["gain"] += value in a layer, which must overwrite the gradient."""
    train(Blocks(Adds(), mz.nn.Linear(4, 2)), strategy="ddp")


@case.mistake("LayoutError", "block 'block0', Table", "of the 36 elements", "'rows'", "unused rows", status=70)
def a_table_with_rows_left_out():
    """Write the gradient only of those rows of an embedding that a batch uses."""
    train(Blocks(Table(), mz.nn.Linear(4, 2)), x=np.arange(8) % 8)


@case.mistake("LayoutError", "float16", "'weight'", "samples", status=70)
def a_gradient_in_half_precision():
    """Return a gradient in float16."""
    train(function(grads=lambda grads: {name: value.astype(np.float16) for name, value in grads.items()}))


@case.mistake("LayoutError", "complex128", "'bias'", "real", status=70)
def a_complex_gradient():
    """Return a complex gradient of a real parameter."""
    train(function(grads=lambda grads: {**grads, "bias": grads["bias"] + 0j * np.ones(2)}))


@case.mistake("LayoutError", "'wieght'", "did you mean 'weight'?", status=70)
def a_gradient_under_a_wrong_name():
    """Return the gradient of "weight" under "wieght"."""
    train(function(grads=lambda grads: {"wieght": grads["weight"], "bias": grads["bias"]}))


@case.mistake("LayoutError", "as the loss", "(str)", "expected one real number", status=70)
def a_loss_as_text():
    """Return the loss as formatted text."""
    train(function(loss=lambda loss: f"{loss:.3f}"))


@case.mistake("LayoutError", "as the loss", "shape (2,)", status=70)
def a_loss_for_every_sample():
    """Return an array of losses, one for each sample, instead of their sum."""
    train(function(loss=lambda loss: np.full(2, loss)))


@case.mistake("DataError", "as the weight", "expected a number >= 0", status=65)
def a_negative_weight():
    """Return a negative weight on one rank."""
    train(function(weight=lambda weight: -weight))


@case.mistake("DataError", "float32", "ratios of weights", status=65)
def a_weight_beyond_float32():
    """Return weights that float32 cannot hold."""
    train(function(weight=lambda weight: 1e39 * weight))


@case.mistake("NonFiniteError", "step 1 skipped", "the weight is not finite", "skipped 5 steps in a row", status=70)
def an_infinite_weight():
    """Return an infinite weight on one rank in every step."""
    train(function(weight=lambda weight: np.inf), steps=100)


@case.mistake("NonFiniteError", "step 1 skipped", "'bias'", "skipped 5 steps in a row", status=70)
def gradients_that_stay_nan():
    """Return a gradient that is NaN on one rank in every step."""
    train(function(grads=lambda grads: {**grads, "bias": grads["bias"] * np.float32(np.nan)}), steps=100)


@case.mistake("NonFiniteError", "no validation loss of 1 epoch(s) was finite", status=70)
def optimize_over_samples_that_are_nan():
    """Call optimize on samples that are NaN."""
    config = case.config()
    model = mz.ZeRO1Model(mz.FunctionModel(case.parameters(), case.squares), config)
    optimizer = mz.ZeRO1Optimizer(mz.SGD(lr=0.1), config, options=mz.OptimizationOptions(epochs=100, batch_size=16))
    optimizer.set_model(model)
    optimizer.optimize((np.full((32, 4), np.nan, np.float32), np.zeros((32, 2), np.float32)))


@case.mistake("NonFiniteError", "apply_gradients: the gradient is infinite or NaN", status=70)
def a_nan_applied_by_hand():
    """Pass a gradient that is NaN to apply_gradients."""
    x, y = case.samples()
    with mz.ZeRO2Model(function(grads=lambda g: {**g, "bias": g["bias"] / 0}), case.config()) as m:
        m.apply_gradients(m.compute_gradients(x, y), 0.1)


@case.mistake("ConfigError", "ParameterGroup('wieght')", "did you mean 'weight'?", status=78)
def a_group_for_no_parameter():
    """Give a ParameterGroup a pattern that matches no parameter."""
    optimizer = mz.AdamW(lr=0.1, groups=[mz.ParameterGroup("wieght", lr_scale=0.1)])
    config = case.config()
    mz.distribute(function(), optimizer, strategy="zero1", config=config)


class Short(mz.data.Source):
    """A data source that returns one sample less than it was asked for."""

    def __len__(self) -> int:
        return 100

    def read(self, indices: Any) -> Any:
        return np.ones((len(indices) - 1, 4), np.float32), np.ones((len(indices), 2), np.float32)

    def describe(self) -> Any:
        return {}


@case.mistake("DataError", "Short.read was asked for", "returned x of shape", status=65)
def a_source_that_gives_fewer_samples():
    """Return fewer samples from a data source than were asked for."""
    config = case.config()
    for x, y in mz.data.batches(Short(), config, 16, steps=3):
        train(function(), x=x)
        del y


@case.mistake(
    "ConfigError",
    "MPIZERO_DEBUG='gradient'",
    "did you mean 'gradients'?",
    status=78,
    environment={"MPIZERO_DEBUG": "collectives,gradient"},
)
def a_debug_switch_that_is_none():
    """Set MPIZERO_DEBUG=collectives,gradient; the second name is unknown."""
    train(function())
