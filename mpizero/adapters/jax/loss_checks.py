"""Check what a user's loss returns, and once, on the first samples, that it is a sum that a trace holds whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpizero.adapters.jax.parameter_tree import count
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.errors import LayoutError, UnsupportedError

#: How far the losses of two halves may be from that of the whole, relative to their size, by bits of the parameters.
_APART = {16: 3e-2, 32: 1e-3, 64: 1e-8}
_ADVICE = "expected one real number, the sum of the samples' losses, or that with their weight: (loss_sum, weight)"


def sum_and_weight(loss: TracedFunction, returned: Any) -> tuple[Any, Any]:
    """Return the traced sum of losses that ``loss`` returned, and the weight, None where it returned only the sum.

    Raises
    ------
    LayoutError
        If one of both is no real number.
    """
    pair = isinstance(returned, tuple | list)
    if pair and len(returned) != 2:
        raise LayoutError(f"{loss.shown} returned {len(returned)} values: {_ADVICE}")
    found, weight = returned if pair else (returned, None)
    if (told := _no_number(found, "f")) is not None:
        way = "; jax.numpy.sum(losses) adds them up" if "shape" in told else ""
        raise LayoutError(f"{loss.shown} returned {told} as the loss: {_ADVICE}{way}")
    if weight is not None and (told := _no_number(weight, "biuf")) is not None:
        raise LayoutError(
            f"{loss.shown} returned {told} as the weight: expected one real number, how much the samples count, for a "
            "plain mean their number"
        )
    return jnp.asarray(found), weight


def _no_number(value: Any, kinds: str) -> str | None:
    """Return what ``value`` is, where it is no number of one of the ``kinds`` of dtypes; None where it is one."""
    if not isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        return "None" if value is None else f"a {type(value).__name__}"
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape:
        return f"an array of {dtype} of shape {shape}"
    return None if dtype.kind in kinds or dtype == jnp.bfloat16 else f"a number of type {dtype}"


def check_first_grain(
    loss: TracedFunction,
    value: Callable[..., tuple[Any, Any]],
    parameters: tuple[Any, ...],
    batch: tuple[Any, Any],
    key: tuple[Any, ...] = (),
) -> bool:
    """Check a loss on its first samples; return whether there were enough of them, two.

    ``value`` is the function that is compiled. It takes ``parameters``, the trees of samples of ``batch``, and what
    makes a key, if there is one.

    Raises
    ------
    UnsupportedError
        If two traces of the loss differ: it drew random numbers or used a variable that changes.
    LayoutError
        If loss or weight are not the sums over the samples.
    """
    _check_traces(loss, value, (*parameters, *batch, *key))
    samples = count(*batch)
    if samples < 2 or any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(batch)):
        return False

    def part(start: int, stop: int | None) -> np.ndarray[Any, Any]:
        cut = jax.tree_util.tree_map(lambda leaf: leaf[start:stop], batch)
        found, weight = forward(*parameters, *cut, *[None for _ in key])
        return np.array([found, count(*cut) if weight is None else weight], np.float64)

    forward = jax.jit(value)
    try:
        whole, halves = part(0, None), [part(0, samples // 2), part(samples // 2, None)]
    except Exception:
        if loss.takes_key:
            return True  # it needs its key, and draws other numbers for other samples
        raise
    bits = jnp.finfo(jax.tree_util.tree_leaves((parameters, batch))[0].dtype).bits
    _check_sums(loss, whole, halves, samples, _APART[bits])
    return True


def check_rows(apply: TracedFunction, computed: Callable[[Any], Any], x: Any) -> bool:
    """Check a block on its first samples; return whether there were enough of them, two.

    ``computed`` applies the block to samples ``x``.

    Raises
    ------
    LayoutError
        If the output for a half of the samples is not a half of the output.
    """
    samples = count(x)
    if samples < 2 or any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(x)):
        return False
    half = samples // 2
    try:
        with apply.traced(without_key=True):
            whole, first = computed(x), computed(jax.tree_util.tree_map(lambda leaf: leaf[:half], x))
    except Exception:
        if apply.takes_key:
            return True  # it needs its key
        raise
    for a, b in zip(jax.tree_util.tree_leaves(whole), jax.tree_util.tree_leaves(first), strict=True):
        if jnp.shape(a)[:1] != (samples,) or jnp.shape(b) != (half, *jnp.shape(a)[1:]):
            raise LayoutError(
                f"{apply.shown} returned an array of shape {jnp.shape(a)} for {samples} samples: the first axis of "
                "every array counts samples"
            )
        if a.dtype.kind != "f" or not (np.isfinite(a).all() and np.isfinite(b).all()):
            continue
        apart, size = float(jnp.max(jnp.abs(a[:half] - b), initial=0)), float(jnp.max(jnp.abs(a), initial=0))
        if apart > _APART[jnp.finfo(a.dtype).bits] * size:
            raise LayoutError(
                f"{apply.shown}: rows of its output depend on other samples: for {half} of the first {samples} samples "
                f"they differ by {apart:.3g}; compute each sample by itself: grains have another number of samples"
            )
    return True


def _check_sums(
    loss: TracedFunction, whole: np.ndarray[Any, Any], halves: list[np.ndarray[Any, Any]], samples: int, within: float
) -> None:
    if not np.isfinite([whole, *halves]).all():
        return  # told by the step itself, with the tensor
    apart = abs(whole - sum(halves))
    allowed = within * np.maximum(abs(whole), sum(map(abs, halves)))
    for at, what in enumerate(("loss", "weight")):
        if apart[at] <= allowed[at] or not allowed[at]:
            continue
        first, second = halves[0][at], halves[1][at]
        mean = (first * (samples // 2) + second * (samples - samples // 2)) / samples
        why = (
            "a term that does not depend on the samples, such as a penalty on the parameters: multiply it by len(x); "
            "or samples that see each other, as in batch normalization"
        )
        if what == "weight":
            why = "a weight that does not grow with the samples: return their number"
        elif abs(mean - whole[at]) <= 1e-2 * abs(whole[at]):
            why = "a mean over the samples: return their sum, jax.numpy.sum(losses)"
        raise LayoutError(
            f"{loss.shown}: the {what} of the first {samples} samples is {whole[at]:.6g}, of their two halves "
            f"{first:.6g} + {second:.6g}; probably {why}"
        )


def _check_traces(loss: TracedFunction, value: Callable[..., Any], given: tuple[Any, ...]) -> None:
    first, second = (jax.make_jaxpr(lambda *arguments: value(*arguments))(*given) for _ in range(2))
    if str(first) != str(second) or not all(map(_same, first.consts, second.consts)):
        raise UnsupportedError(
            f"{loss.shown} computes something else when it is traced again: it draws numbers from numpy.random or "
            "random, or uses a variable that changes, and JAX would keep what it was at the first call; compute from "
            "the arguments, and random numbers from an argument key"
        )


def _same(a: Any, b: Any) -> bool:
    return a is b or (np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes())
