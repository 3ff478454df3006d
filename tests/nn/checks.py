"""Checks that every layer must pass."""

from __future__ import annotations

import numpy as np

from mpizero.layout.flat import nested
from mpizero.types import EVALUATE


def random_parameters(layer, rng, dtype=np.float64):
    """Random values for every spec, flat by name, and nested read-only as layers get them."""
    flat = {spec.name: rng.normal(size=spec.shape).astype(dtype) for spec in layer.specs()}
    views = {name: value.view() for name, value in flat.items()}
    for view in views.values():
        view.flags.writeable = False
    return flat, nested(dict(views.items()))


def gradient_slots(layer, dtype=np.float64):
    """Gradient views filled with NaN, so that anything not overwritten shows."""
    flat = {spec.name: np.full(spec.shape, np.nan, dtype) for spec in layer.specs() if spec.trainable}
    return flat, nested(dict(flat.items()))


def central_difference(function, array, step=1e-5):
    """d function / d array, element by element; ``array`` is restored."""
    slope = np.empty(array.shape)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        high = function()
        array[index] = kept - step
        low = function()
        array[index] = kept
        slope[index] = (high - low) / (2 * step)
    return slope


def require_gradients(layer, x, run=EVALUATE):
    """Check a layer's backward pass in float64 by central differences, over all parameters and the input."""
    rng = np.random.default_rng(7)
    flat, params = random_parameters(layer, rng)
    y, cache = layer.forward(params, x, run)
    dy = rng.normal(size=y.shape)
    grads_flat, grads = gradient_slots(layer)
    dx = layer.backward(params, cache, dy, grads)

    def value():
        return float((layer.forward(params, x, run)[0] * dy).sum())

    inputs = {} if dx is None else {"x": (dx, x)}
    for name, (gradient, array) in {**{n: (g, flat[n]) for n, g in grads_flat.items()}, **inputs}.items():
        expected = central_difference(value, array)
        np.testing.assert_allclose(gradient, expected, rtol=2e-7, atol=1e-7, err_msg=name)
    return dx


def require_contract(layer, x, run=EVALUATE):
    """Check what no difference quotient sees: halves equal the whole, nothing is overwritten, dtypes stay."""
    rng = np.random.default_rng(7)
    for dtype in (np.float32, np.float64) if x.dtype.kind == "f" else (np.float32,):
        here = x.astype(dtype) if x.dtype.kind == "f" else x
        kept = here.copy()
        _, params = random_parameters(layer, rng, dtype)
        y, cache = layer.forward(params, here, run)
        assert (y.dtype, y.shape) == (dtype, (*here.shape[:1], *layer.output_shape(here.shape[1:])))
        dy = rng.normal(size=y.shape).astype(dtype)
        dy_kept = dy.copy()
        whole, grads = gradient_slots(layer, dtype)
        dx = layer.backward(params, cache, dy, grads)
        halves, grads = gradient_slots(layer, dtype)
        half_dx, pending = layer.backward_input(params, layer.forward(params, here, run)[1], dy)
        assert all(np.isnan(g).all() for g in halves.values()), "the input half writes no gradients"
        layer.backward_weights(params, cache, pending, grads)
        for name in whole:
            np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)
        np.testing.assert_array_equal(here, kept, err_msg="x was written to")
        np.testing.assert_array_equal(dy, dy_kept, err_msg="dy was written to")
        if dx is not None:
            np.testing.assert_array_equal(dx, half_dx)
            assert (dx.dtype, dx.shape) == (dtype, here.shape)


def require_layer(layer, shape, rng, run=EVALUATE):
    """Check gradients and contract of a layer of arrays, and that no samples have gradients of zero."""
    assert require_gradients(layer, rng.normal(size=shape), run) is not None
    require_contract(layer, rng.normal(size=shape), run)
    (_, params), (flat, grads) = random_parameters(layer, rng), gradient_slots(layer)
    y, cache = layer.forward(params, np.empty((0, *shape[1:])), run)
    assert y.shape == (0, *layer.output_shape(shape[1:]))
    assert layer.backward(params, cache, np.empty(y.shape), grads).shape == (0, *shape[1:])
    assert not any(gradient.any() for gradient in flat.values())
